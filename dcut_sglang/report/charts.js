"use strict";
// Charts of rows, and of all traces together.

const GLYPHS = ["●", "■", "◆", "▲", "+", "×", "★", "⬢"]; // as SYMBOLS, for texts
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon"];
const DASHES = ["solid", "6px,3px", "2px,3px", "7px,3px,2px,3px", "12px,3px"];
const VARIANTS = ["", "-open", "-open-dot", "-dot"]; // of a symbol, by kind of prompts
const KNOWN_ARMS = ["plain", "dflash", "dcut"];
const METRICS = { tokens_per_cpu_s: "tokens per CPU-second", tokens_per_s: "tokens per second" };

/** Waves and passes of one arm, load, file and commit, brought together. */
function pointsOf(rows) {
  const key = (r) => JSON.stringify([r.source, r.commit, r.pair, r.arm, r.prompts, r.concurrency, r.request_rate]);
  const average = (group, name) => {
    const values = group.map((r) => r[name]).filter(isNumber);
    return values.length ? mean(values) : null;
  };
  const averageFirst = (group, name) => {
    const values = group.map((r) => r[name] && r[name][0]).filter(isNumber);
    return values.length ? mean(values) : null;
  };
  const points = [...groupBy(rows, key).values()].map((group) => {
    const equal = group.map((r) => r.equal_to_plain).filter(Boolean);
    const point = {
      ...group[0],
      rates: {},
      user: average(group, "user_tokens_per_s"),
      ttft: averageFirst(group, "ttft_ms"),
      tpot: averageFirst(group, "tpot_ms"),
      step_sample: group.flatMap((r) => r.step_sample || []),
      by_batch_size: group.flatMap((r) => r.by_batch_size || []),
      equal: equal.length ? [sum(equal.map((e) => e[0])), sum(equal.map((e) => e[1]))] : null,
    };
    for (const name of Object.keys(METRICS)) point.rates[name] = group.flatMap((r) => r[name]);
    for (const name of ["accept_length", "rows_per_step", "keep_ratio", "plain_share", "predicted_ms", "measured_ms"]) {
      point[name] = average(group, name);
    }
    point.rate = point.rates.tokens_per_s.length ? mean(point.rates.tokens_per_s) : null;
    point.cpuRate = point.rates.tokens_per_cpu_s.length ? mean(point.rates.tokens_per_cpu_s) : null;
    return point;
  });
  return points.sort((a, b) => (a.concurrency ?? 0) - (b.concurrency ?? 0));
}

/** Sets each point's speed-up over plain decoding under the same load, paired by wave or pass. */
function compareWithPlain(points, metric) {
  const load = (p) => JSON.stringify([p.source, p.commit, p.pair, p.prompts, p.concurrency, p.request_rate]);
  const plain = new Map(points.filter((p) => p.arm === "plain").map((p) => [load(p), p.rates[metric]]));
  for (const point of points) {
    const [mine, theirs] = [point.rates[metric], plain.get(load(point))];
    if (!mine.length || !theirs || !theirs.length) point.speedup = null;
    else if (mine.length !== theirs.length) point.speedup = mean(mine) / mean(theirs);
    else point.speedup = Math.exp(mean(mine.map((rate, i) => Math.log(rate / theirs[i]))));
  }
}

/** Place of an arm's symbol: with more arms than colours, a colour comes again with another symbol. */
const look = (i) => (i + Math.floor(i / 8)) % SYMBOLS.length;

/** Arms and kinds of prompts of all rows, in the order that gives them colour, symbol and dash. */
function styleOrder(rows) {
  const others = unique(rows.map((r) => r.arm)).filter((arm) => !KNOWN_ARMS.includes(arm)).sort();
  return { arms: [...KNOWN_ARMS, ...others], prompts: unique(rows.map((r) => r.prompts)).sort() };
}

/** Colour, symbol and dash of a series: an arm keeps its own, kinds of prompts differ by dash. */
function stylesOf({ arms, prompts }) {
  return (arm, kind) => {
    const [i, j] = [arms.indexOf(arm), prompts.indexOf(kind)];
    return {
      line: { color: color(`arm-${i % 8}`), dash: DASHES[j % DASHES.length], width: 2 },
      marker: { color: color(`arm-${i % 8}`), symbol: SYMBOLS[look(i)] + VARIANTS[j % VARIANTS.length], size: 9 },
    };
  };
}

function seriesOf(points, style, build) {
  const manyFiles = unique(points.map((p) => `${p.source} ${p.commit}`)).length > 1;
  const key = (p) => JSON.stringify([p.arm, p.prompts, p.source, p.commit]);
  return [...groupBy(points, key).values()].map((group) => {
    const p = group[0];
    const name = [p.arm, p.prompts, manyFiles ? `${p.source} ${p.commit}` : null].filter(Boolean).join(" · ");
    return { name: literal(name), mode: "lines+markers", type: "scatter", showlegend: false, ...style(p.arm, p.prompts), ...build(group) };
  }).filter((s) => s.x.length);
}

function drawRowCharts(points, metric, style) {
  const loads = points.map((p) => p.concurrency).filter(isNumber);
  const closed = points.filter((p) => isNumber(p.concurrency));
  const concurrency = () => loadAxis("concurrent requests", loads);

  draw("throughput", seriesOf(closed.filter((p) => p.rates[metric].length), style, (group) => {
    const averages = group.map((p) => mean(p.rates[metric]));
    return {
      x: group.map((p) => p.concurrency),
      y: averages,
      error_y: {
        type: "data", symmetric: false, thickness: 1,
        array: group.map((p, i) => Math.max(...p.rates[metric]) - averages[i]),
        arrayminus: group.map((p, i) => averages[i] - Math.min(...p.rates[metric])),
      },
      hovertemplate: "%{y:.1f} at %{x} requests<extra>%{fullData.name}</extra>",
    };
  }), { xaxis: concurrency(), yaxis: axis(METRICS[metric], { rangemode: "tozero" }) },
  "Means over waves or passes; bars from the slowest to the fastest.");

  const speeds = points.filter((p) => isNumber(p.user) && isNumber(p.rate));
  draw("per-user", seriesOf(speeds, style, (group) => ({
    x: group.map((p) => p.user),
    y: group.map((p) => p.rate),
    mode: "lines+markers+text",
    textposition: "top right",
    text: group.map((p) => (isNumber(p.concurrency) ? String(p.concurrency) : `${count(p.request_rate)}/s`)),
    customdata: group.map((p) => p.user_speed_from),
    hovertemplate: "%{y:.1f} tokens/s in all, %{x:.1f} per request (%{customdata}); load %{text}<extra>%{fullData.name}</extra>",
  })), {
    xaxis: axis("tokens per second of one request", { rangemode: "tozero" }),
    yaxis: axis("tokens per second of all", { rangemode: "tozero" }),
  }, "Numbers beside the points: concurrent requests, or arrivals per second.");

  const accepted = closed.filter((p) => isNumber(p.accept_length));
  draw("accept", seriesOf(accepted, style, (group) => ({
    x: group.map((p) => p.concurrency),
    y: group.map((p) => p.accept_length),
    hovertemplate: "%{y:.2f} tokens at %{x} requests<extra>%{fullData.name}</extra>",
  })), { xaxis: concurrency(), yaxis: axis("tokens per request and step", { rangemode: "tozero" }) },
  "Accept length; the target's own token counts, plain steps too.");

  drawKeepOfRows(closed, style);
  drawTimesOfRows(points, style);
}

function drawHeat(points, metric, arm) {
  const filesOf = groupBy(points, (p) => p.prompts);
  const isShared = (p) => unique(filesOf.get(p.prompts).map((q) => q.source)).length > 1;
  const label = (p) => literal(p.prompts) + (isShared(p) ? `<br>${literal(p.source.replace(/\.jsonl$/, ""))}` : "");
  // The last row of a load counts where a file holds several commits.
  const cells = new Map();
  for (const p of [...points].sort((a, b) => (a.time < b.time ? -1 : 1))) cells.set(`${p.concurrency}|${label(p)}`, p);
  const columns = unique(points.map((p) => p.concurrency)).sort((a, b) => a - b);
  const lines = unique(points.map(label)).sort();
  const ratios = lines.map((line) => columns.map((c) => cells.get(`${c}|${line}`)?.speedup ?? null));
  const found = ratios.flat().filter(isNumber);
  const geomean = found.length ? Math.exp(mean(found.map(Math.log))) : null;
  const most = Math.max(0.1, ...found.map((r) => Math.abs(Math.log2(r))));
  draw("heat", found.length ? [{
    type: "heatmap", x: columns.map(String), y: lines, z: ratios.map((line) => line.map((r) => (isNumber(r) ? Math.log2(r) : null))),
    text: ratios.map((line) => line.map((r) => (isNumber(r) ? `${r.toFixed(2)} ×` : ""))), texttemplate: "%{text}",
    textfont: { color: color("ink") }, zmin: -most, zmax: most, xgap: 2, ygap: 2, showscale: false,
    colorscale: [[0, color("heat-low")], [0.5, color("heat-middle")], [1, color("heat-high")]],
    hovertemplate: "%{text} plain decoding at %{x} requests, %{y}<extra></extra>",
  }] : [], { xaxis: axis("concurrent requests", { type: "category" }), yaxis: axis("", { type: "category" }) },
  geomean === null
    ? `No load has both ${arm || "another arm"} and plain decoding.`
    : `${arm} over plain decoding, ${METRICS[metric]}; geometric mean of ${found.length} ${found.length === 1 ? "load" : "loads"}: ${geomean.toFixed(2)} ×.`);
  document.getElementById("heat").dataset.geomean = geomean === null ? "" : geomean.toFixed(4);
}

function drawKeepOfRows(points, style) {
  const series = seriesOf(points.filter((p) => p.by_batch_size.length), style, (group) => {
    const sizes = [...groupBy(group.flatMap((p) => p.by_batch_size), (e) => e[0])].sort((a, b) => a[0] - b[0]);
    const ratio = sizes.map(([bs, entries]) => [bs, sum(entries.map((e) => e[3])) / sum(entries.map((e) => e[2]))]).filter((e) => isNumber(e[1]));
    return {
      x: ratio.map((e) => e[0]), y: ratio.map((e) => e[1]),
      hovertemplate: "%{y:.2f} at batch size %{x}<extra>%{fullData.name}</extra>",
    };
  });
  const whole = seriesOf(points.filter((p) => !p.by_batch_size.length && isNumber(p.keep_ratio)), style, (group) => ({
    x: group.map((p) => p.concurrency), y: group.map((p) => p.keep_ratio),
    hovertemplate: "%{y:.2f} at %{x} concurrent requests<extra>%{fullData.name}</extra>",
  }));
  const all = [...series, ...whole];
  draw("keep", all, {
    xaxis: loadAxis("batch size", all.flatMap((s) => s.x)), yaxis: axis("kept / drafted", { range: [0, 1.05] }),
  }, whole.length ? "Of rows without batch sizes: by concurrent requests." : "");
}

function timesChart(id, series, caption) {
  const values = series.flatMap((s) => [...s.x, ...s.y]);
  const ends = values.length ? [Math.min(...values) * 0.9, Math.max(...values) * 1.1] : [];
  const line = {
    x: ends, y: ends, mode: "lines", type: "scatter", name: "as predicted", hoverinfo: "skip",
    line: { color: color("soft"), dash: "dot", width: 1 }, showlegend: false,
  };
  // Over a wide range the short steps would lie in a corner.
  const scale = values.length && Math.max(...values) > 8 * Math.min(...values) ? { type: "log", dtick: "D2" } : { nticks: 7 };
  draw(id, values.length ? [line, ...series] : [], {
    xaxis: axis("predicted ms per step", scale), yaxis: axis("measured ms per step", scale),
  }, caption);
}

function drawTimesOfRows(points, style) {
  const timed = points.filter((p) => p.step_sample.length || (p.predicted_ms && p.measured_ms));
  timesChart("times", seriesOf(timed, style, (group) => {
    const steps = group.flatMap((p) => (p.step_sample.length ? p.step_sample : [[p.concurrency, null, p.predicted_ms, p.measured_ms]]));
    const whole = steps.filter((s) => s[2] > 0 && s[3] > 0);
    return {
      mode: "markers", x: whole.map((s) => s[2]), y: whole.map((s) => s[3]), text: whole.map((s) => String(s[0])), opacity: 0.75,
      hovertemplate: "predicted %{x:.1f} ms, measured %{y:.1f} ms, batch size %{text}<extra>%{fullData.name}</extra>",
    };
  }), "Single steps where the rows have them, else means per row; dotted: as predicted.");
}

/** Charts of one trace: times, keep ratio and tokens by batch size. */
function drawTraceCharts(prefix, trace, steps) {
  const modes = [["speculate", "decided", 2, "diamond"], ["plain", "plain", 0, "circle"], ["forced", "forced", 1, "square"]];
  const kindOf = (s) => (s.forced ? "forced" : s.mode);
  timesChart(`${prefix}-times`, modes.map(([kind, name, i, symbol]) => {
    const some = steps.filter((s) => kindOf(s) === kind && s.predicted_ms > 0 && s.measured_ms > 0);
    return {
      name, mode: "markers", type: "scatter", opacity: 0.75, marker: { color: color(`arm-${i}`), symbol, size: 7 },
      x: some.map((s) => s.predicted_ms), y: some.map((s) => s.measured_ms), text: some.map((s) => `step ${s.step}, batch size ${s.kept.length}`),
      hovertemplate: "%{text}: predicted %{x:.1f} ms, measured %{y:.1f} ms<extra></extra>",
    };
  }).filter((s) => s.x.length), "Dotted: as predicted. Forced steps have no prediction.");

  const sizes = [...groupBy(steps, (s) => s.kept.length)].sort((a, b) => a[0] - b[0]);
  const curve = (name, i, value, template) => {
    const found = sizes.map(([bs, some]) => [bs, value(some), some.length]).filter((e) => isNumber(e[1]));
    return {
      name, mode: "lines+markers", type: "scatter", line: { color: color(`arm-${i}`), dash: DASHES[i % DASHES.length] },
      marker: { color: color(`arm-${i}`), symbol: SYMBOLS[i], size: 8 },
      x: found.map((e) => e[0]), y: found.map((e) => e[1]), customdata: found.map((e) => e[2]), hovertemplate: template,
    };
  };
  const drafted = (some) => sum(some.flatMap((s) => s.confidence.map((c) => c.length)));
  const numSteps = "batch size %{x}, %{customdata} steps<extra></extra>";
  draw(`${prefix}-keep`, [
    curve("kept / drafted", 2, (some) => sum(some.flatMap((s) => s.kept)) / drafted(some), `%{y:.2f} kept, ${numSteps}`),
    curve("plain steps / steps", 0, (some) => some.filter((s) => s.mode === "plain").length / some.length, `%{y:.2f} plain, ${numSteps}`),
  ], { xaxis: loadAxis("batch size", sizes.map((e) => e[0])), yaxis: axis("share", { range: [0, 1.05] }) }, "Kept of the drafts that were computed.");
  draw(`${prefix}-accept`, [
    curve("emitted", 2, (some) => sum(some.map((s) => s.emitted)) / sum(some.map((s) => s.kept.length)), `%{y:.2f} tokens, ${numSteps}`),
    curve("promised by the confidences", 1, (some) => sum(some.map((s) => s.expected)) / sum(some.map((s) => s.kept.length)), `%{y:.2f} promised, ${numSteps}`),
  ], { xaxis: loadAxis("batch size", sizes.map((e) => e[0])), yaxis: axis("tokens per request and step", { rangemode: "tozero" }) }, "Accept length, and what the drafter's confidences promised of the kept drafts.");
}
