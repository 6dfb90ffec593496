"use strict";
// Puts the page together.

function section(id, heading, ...children) {
  const node = el("section", { id: `${id}-section`, "aria-label": heading }, el("h2", {}, heading), ...children);
  document.getElementById("main").append(node);
  document.getElementById("contents").append(el("a", { href: `#${id}-section` }, heading));
  return node;
}

function checkboxes(legend, name, values, action, order = null) {
  return el("fieldset", { id: `filter-${name}` }, el("legend", {}, legend),
    ...values.map((value) => el("label", {}, el("input", { type: "checkbox", name, value, checked: true, onchange: action }),
      order ? swatch(name, order.indexOf(value)) : null, value)));
}

function selectOf(label, id, options, action) {
  return el("label", { class: "field" }, el("span", {}, label),
    el("select", { id, onchange: action }, ...options.map(([value, text]) => el("option", { value }, text))));
}

/** What the checkbox of an arm or a kind of prompts stands for in the charts. */
function swatch(name, place) {
  if (name === "arm") return el("span", { class: "swatch", style: `color: var(--arm-${place % 8})`, "aria-hidden": "true" }, GLYPHS[look(place)]);
  const part = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const variant = VARIANTS[place % VARIANTS.length];
  const picture = part("svg", { width: 34, height: 12, "aria-hidden": "true" });
  const dash = DASHES[place % DASHES.length].replace("solid", "none").replaceAll("px", "");
  picture.append(
    part("line", { x1: 0, y1: 6, x2: 34, y2: 6, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": dash }),
    part("circle", { cx: 17, cy: 6, r: 4, stroke: "currentColor", "stroke-width": 1.5, fill: variant.includes("open") ? "var(--panel)" : "currentColor" }),
    ...(variant.includes("dot") ? [part("circle", { cx: 17, cy: 6, r: 1.5, fill: variant.includes("open") ? "currentColor" : "var(--panel)" })] : []),
  );
  return picture;
}

const checked = (name) => [...document.querySelectorAll(`input[name="${name}"]:checked`)].map((box) => box.value);

/** Rows: filters, charts, table. Returns what redraws them. */
function rowsPart(rows) {
  const arms = unique(rows.map((r) => r.arm)).sort((a, b) => {
    const order = (arm) => (KNOWN_ARMS.includes(arm) ? KNOWN_ARMS.indexOf(arm) : KNOWN_ARMS.length);
    return order(a) - order(b) || (a < b ? -1 : 1);
  });
  const order = styleOrder(rows);
  const others = arms.filter((arm) => arm !== "plain");
  const metrics = Object.keys(METRICS).filter((m) => rows.some((r) => r[m].length));
  const pairs = unique(rows.map((r) => r.pair));
  const update = () => {
    const [pair, metric, heatArm] = ["pair", "metric", "heat-arm"].map((id) => document.getElementById(`filter-${id}`).value);
    const [files, kinds, wanted] = ["file", "prompts", "arm"].map(checked);
    const all = pointsOf(rows.filter((r) => r.pair === pair && files.includes(r.source) && kinds.includes(r.prompts)));
    compareWithPlain(all, metric);
    // The heat map has an arm of its own to choose.
    const points = all.filter((p) => wanted.includes(p.arm));
    drawRowCharts(points, metric, stylesOf(order));
    drawHeat(all.filter((p) => p.arm === heatArm && isNumber(p.speedup) && isNumber(p.concurrency)), metric, heatArm);
    drawRowTable(document.getElementById("row-table"), points);
  };
  section("rows", "Benchmark rows",
    el("div", { class: "filters" },
      selectOf("model pair", "filter-pair", pairs.map((p) => [p, p]), update),
      selectOf("throughput in", "filter-metric", metrics.map((m) => [m, METRICS[m]]), update),
      selectOf("heat map of", "filter-heat-arm", others.map((a) => [a, a]), update),
      checkboxes("arms", "arm", arms, update, order.arms),
      checkboxes("prompts", "prompts", order.prompts, update, order.prompts),
      checkboxes("files", "file", unique(rows.map((r) => r.source)), update)),
    el("div", { class: "grid" },
      chartFigure("throughput", "Throughput over concurrency", "Throughput over concurrent requests, a line per arm; numbers in the table below"),
      chartFigure("heat", "Speed-up over plain decoding", "Speed-up over plain decoding by prompts and concurrency; numbers in the table below"),
      chartFigure("per-user", "Throughput against the speed of one request", "Throughput over tokens per second of one request; numbers in the table below"),
      chartFigure("times", "Predicted and measured step time", "Measured over predicted milliseconds per step; means in the table below"),
      chartFigure("keep", "Keep ratio by batch size", "Kept over drafted drafts by batch size; numbers in the table below"),
      chartFigure("accept", "Accept length", "Tokens per request and step over concurrent requests; numbers in the table below")),
    el("h3", {}, "Rows"), el("div", { id: "row-table" }));
  if (others.includes("dcut")) document.getElementById("filter-heat-arm").value = "dcut";
  return update;
}

function tracePart(trace, i) {
  const prefix = `trace-${i}`;
  const viewer = new StepViewer(prefix, trace);
  const last = trace.first + trace.steps.length - 1;
  const end = {
    closed: "complete", full: `full after ${trace.num_steps} steps, ${trace.dropped_steps} more were not recorded`,
    missing: "without an end record: its writer was stopped", damaged: "damaged; what follows the damage is not read",
  }[trace.end];
  const whole = trace.steps.length === trace.num_steps;
  section(prefix, `Trace ${trace.name}`,
    el("p", { class: "note" }, `${trace.num_steps} steps, blocks of ${trace.block_size}; ${end}. `
      + (whole ? "All steps are on this page. " : `On this page: steps ${trace.first} to ${last}, by place; others with --steps. `)
      + (trace.recomputed ? `Candidates of ${trace.recomputed} steps are recomputed from the cost table ${DATA.costs}, without the calibration and the corrected costs of the run. ` : "")
      + (trace.recomputed && trace.costs_differ.length ? `That table was measured with another ${trace.costs_differ.join(", ")}: its times are not this run's. ` : "")
      + `A surprise: a time more than ${percent(DATA.surprise.time)} off the prediction, or tokens more than ${DATA.surprise.tokens} standard deviations off what the confidences promised.`),
    el("p", { class: "note" }, "Predicted and measured milliseconds are on the cost table's clock (on a CPU, the thread's CPU time), those of the phases are wall time. "
      + "Keys, with the viewer in focus: left and right arrow, Home, End, p (next plain step), s (next surprise)."),
    viewer.root,
    el("div", { class: "grid" },
      chartFigure(`${prefix}-times`, "Predicted and measured step time", "Measured over predicted milliseconds of each step"),
      chartFigure(`${prefix}-keep`, "Keep ratio by batch size", "Share of computed drafts that were kept, and of plain steps, by batch size"),
      chartFigure(`${prefix}-accept`, "Accept length by batch size", "Tokens emitted per request and step, and promised by the confidences, by batch size")),
    el("h3", {}, "Conditions"),
    sortableTable(`Conditions of ${trace.name}`, [
      { name: "condition", value: (c) => c[0], isText: true }, { name: "value", value: (c) => c[1], isText: true, wide: true },
    ], Object.entries(trace.conditions)));
  return () => {
    viewer.render();
    drawTraceCharts(prefix, trace, viewer.shown);
  };
}

async function start() {
  const counts = [`${DATA.rows.length} arm rows`, `${DATA.traces.length} ${DATA.traces.length === 1 ? "trace" : "traces"}`];
  document.getElementById("made").textContent = `Made ${DATA.made} by dcut_sglang ${DATA.version} from ${counts.join(" and ")}. This file is complete in itself and loads nothing.`;
  const redraws = [];
  if (DATA.rows.length) redraws.push(rowsPart(DATA.rows));
  redraws.push(...DATA.traces.map(tracePart));
  if (DATA.rows.length) section("conditions", "Conditions of the rows", conditionsTable(DATA.conditions));
  await loadPlotly();
  const redraw = () => redraws.forEach((one) => one());
  redraw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.body.dataset.ready = "true";
}

start().catch((error) => {
  document.getElementById("main").prepend(el("p", { class: "surprise", role: "alert" }, `The page could not be drawn: ${error.message}`));
  throw error;
});
