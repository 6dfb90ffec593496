"use strict";
// The step viewer: one step of a trace at a time.

const isPlain = (step) => step.mode === "plain";
const kindOfStep = (step) => (step.forced ? "forced" : step.mode);

class StepViewer {
  /** @param prefix of element ids, @param trace as in the data. */
  constructor(prefix, trace) {
    this.prefix = prefix;
    this.trace = trace;
    this.filter = { mode: "all", bs: "all" };
    this.shown = trace.steps;
    this.at = 0;
    this.numbers = "state";
    this.root = this.build();
  }

  get step() {
    return this.shown[this.at];
  }

  build() {
    const id = (name) => `${this.prefix}-${name}`;
    const button = (name, label, hint, action) =>
      el("button", { type: "button", id: id(name), title: hint, onclick: action }, label);
    const sizes = unique(this.trace.steps.map((s) => s.kept.length)).sort((a, b) => a - b);
    const kinds = unique(this.trace.steps.map(kindOfStep));
    const choose = (name, label, options, action) => el("label", { class: "field" }, el("span", {}, label),
      el("select", { id: id(name), onchange: (event) => action(event.target.value) },
        ...options.map(([value, text]) => el("option", { value }, text))));
    this.slider = el("input", {
      type: "range", id: id("slider"), min: 0, value: 0, "aria-label": "step",
      oninput: () => this.go(Number(this.slider.value)),
    });
    this.number = el("input", {
      type: "number", id: id("number"), "aria-label": "go to step number", onchange: () => this.goToNumber(Number(this.number.value)),
    });
    this.controls = el("div", { class: "controls", role: "group", "aria-label": "steps" },
      button("first", "First", "Home", () => this.go(0)),
      button("previous", "Previous", "left arrow", () => this.go(this.at - 1)),
      button("next", "Next", "right arrow", () => this.go(this.at + 1)),
      button("last", "Last", "End", () => this.go(this.shown.length - 1)),
      button("next-plain", "Next plain step", "p", () => this.jump(isPlain)),
      button("next-surprise", "Next surprise", "s", () => this.jump((s) => s.surprise.length > 0)),
      this.slider, el("label", {}, "step ", this.number));
    this.view = el("div", { id: id("view"), "aria-live": "polite" });
    const root = el("div", { class: "viewer", tabindex: "0", role: "region", "aria-label": `Steps of ${this.trace.name}`, onkeydown: (event) => this.key(event) },
      el("div", { class: "filters" },
        choose("mode", "steps", [["all", "all"], ...kinds.map((k) => [k, { speculate: "decided, drafting", plain: "plain", forced: "forced" }[k]]), ["surprise", "surprises"]],
          (value) => this.refilter({ mode: value })),
        choose("bs", "batch size", [["all", "all"], ...sizes.map((s) => [String(s), String(s)])], (value) => this.refilter({ bs: value })),
        choose("numbers", "cells show", [["state", "state (letters)"], ["confidence", "confidence, %"], ["survival", "survival, %"]], (value) => { this.numbers = value; this.render(); })),
      this.controls, this.view,
      el("div", { class: "grid" },
        chartFigure(id("utility"), "Utility of each candidate", "Tokens per millisecond over the number of drafts kept; the table beside it has the numbers", true),
        el("div", { id: id("candidates") })),
      el("div", { id: id("gains") }));
    return root;
  }

  refilter(change) {
    const before = this.step ? this.step.step : 0;
    Object.assign(this.filter, change);
    this.shown = this.trace.steps.filter((s) =>
      (this.filter.mode === "all" || (this.filter.mode === "surprise" ? s.surprise.length : kindOfStep(s) === this.filter.mode))
      && (this.filter.bs === "all" || s.kept.length === Number(this.filter.bs)));
    const place = this.shown.findIndex((s) => s.step >= before);
    this.at = place < 0 ? Math.max(0, this.shown.length - 1) : place;
    this.render();
    drawTraceCharts(this.prefix, this.trace, this.shown);
  }

  go(place) {
    this.at = Math.min(Math.max(place, 0), Math.max(0, this.shown.length - 1));
    this.render();
  }

  goToNumber(number) {
    const place = this.shown.findIndex((s) => s.step >= number);
    this.go(place < 0 ? this.shown.length - 1 : place);
  }

  /** To the next step that is like that, from the start again behind the last. */
  jump(isWanted) {
    const n = this.shown.length;
    for (let ahead = 1; ahead <= n; ahead += 1) {
      const place = (this.at + ahead) % n;
      if (isWanted(this.shown[place])) return this.go(place);
    }
    return undefined;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
    const actions = {
      ArrowLeft: () => this.go(this.at - 1), ArrowRight: () => this.go(this.at + 1), Home: () => this.go(0),
      End: () => this.go(this.shown.length - 1), p: () => this.jump(isPlain), s: () => this.jump((x) => x.surprise.length > 0),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  render() {
    const id = (name) => document.getElementById(`${this.prefix}-${name}`);
    const n = this.shown.length;
    this.slider.max = Math.max(0, n - 1);
    this.slider.value = this.at;
    for (const name of ["first", "previous"]) id(name).disabled = this.at === 0;
    for (const name of ["next", "last"]) id(name).disabled = this.at >= n - 1;
    id("next-plain").disabled = !this.shown.some(isPlain);
    id("next-surprise").disabled = !this.shown.some((s) => s.surprise.length);
    if (!n) {
      this.view.replaceChildren(el("p", {}, "No step matches the filters."));
      id("candidates").replaceChildren();
      id("gains").replaceChildren();
      id("utility").parentElement.hidden = true;
      return;
    }
    const step = this.step;
    this.number.value = step.step;
    this.slider.setAttribute("aria-valuetext", `step ${step.step}`);
    this.view.replaceChildren(
      this.facts(step),
      ...step.surprise.map((text) => el("p", { class: "surprise" }, `Surprise: ${text}.`)),
      el("p", { class: "why" }, whyText(step)),
      blocksTable(step, this.trace, this.numbers), blocksKey(step));
    this.renderCandidates(step, id);
  }

  facts(step) {
    const facts = [
      ["step", `${step.step} (${this.at + 1} of ${this.shown.length})`],
      ["mode", step.forced ? `forced: ${step.forced}` : isPlain(step) ? "plain" : "speculate"],
      ["batch size", step.kept.length],
      ["predicted, ms", show(step.predicted_ms)],
      ["measured, ms", show(step.measured_ms)],
      ["drafts computed", sum(step.confidence.map((c) => c.length))],
      ["drafts kept", sum(step.kept)],
      ["accepted", sum(step.accepted)],
      ["emitted, tokens", step.emitted],
      ["expected, tokens", `${show(step.expected)} ± ${show(step.deviation)}`],
      ["head rows", step.head_rows.length ? step.head_rows.join(" + ") : "–"],
      ...this.trace.phases.map((name, i) => [`${name}, wall ms`, show(step.phase_ms[i])]),
    ];
    return el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
  }

  renderCandidates(step, id) {
    const found = step.candidates;
    const figure = id("utility").parentElement;
    const hasCurve = Boolean(found) && found.kept.length > 1;
    figure.hidden = !hasCurve;
    const numKept = sum(step.kept);
    if (hasCurve) {
      const utility = found.kept.map((_, i) => found.tokens[i] / found.ms[i]);
      const chosen = found.kept.indexOf(numKept);
      draw(`${this.prefix}-utility`, [
        { type: "scatter", mode: "lines+markers", x: found.kept, y: utility, name: "candidates", marker: { size: 4, color: color("arm-2") }, line: { color: color("arm-2") },
          customdata: found.kept.map((_, i) => [found.tokens[i], found.ms[i]]),
          hovertemplate: "keep %{x}: %{y:.4f} tokens/ms = %{customdata[0]:.2f} tokens / %{customdata[1]:.2f} ms<extra></extra>" },
        ...(chosen < 0 ? [] : [{ type: "scatter", mode: "markers", x: [numKept], y: [utility[chosen]], name: "chosen", marker: { size: 13, symbol: "star", color: color("rejected") }, hoverinfo: "skip" }]),
      ], { xaxis: axis("drafts kept over the batch"), yaxis: axis("tokens per ms") },
      step.why === "recomputed" ? "Recomputed from the cost table, not recorded." : "As the controller saw them.");
    }
    id("candidates").replaceChildren(...(found ? [candidatesTable(step)] : []));
    id("gains").replaceChildren(...(step.draft_gains ? [gainsTable(step)] : []));
  }
}

/** One sentence: what was weighed, and what came of it. */
function whyText(step) {
  const found = step.candidates;
  if (!found && step.forced) return "The choice was forced; the controller weighed nothing.";
  if (!found) return "This trace holds no candidates; give a cost table with --costs to have them recomputed.";
  const from = step.why === "recomputed" ? "Recomputed: " : "";
  const utility = found.kept.map((_, i) => found.tokens[i] / found.ms[i]);
  const numKept = sum(step.kept);
  const { best } = found;
  const chosen = found.kept.indexOf(numKept);
  if (found.kept.length === 1) {
    const gains = step.draft_gains || [];
    const most = gains.length ? Math.max(...gains) : null;
    const nothing = `${from}Nothing was drafted, so anchors alone were verified`;
    if (most === null) return `${nothing}.`;
    return most < 0
      ? `${nothing}: drafting was expected to lose ${show(-most, 2)} tokens against a plain step, at best.`
      : `${nothing}: drafting was expected to gain ${show(most, 2)} tokens over a plain step, at best, too few to begin or to go on.`;
  }
  const text = (i) => `${found.kept[i]} (${show(utility[i], 4)} tokens/ms)`;
  if (chosen === best) return `${from}Keeping ${text(best)} has the greatest utility, and was chosen.`;
  const extra = chosen < 0 ? `${numKept}` : text(chosen);
  if (step.forced) return `${from}The choice was forced to ${extra}; the greatest utility has ${text(best)}.`;
  if (step.why === "recomputed") return `${from}${extra} was chosen, ${text(best)} has the greatest utility: calibration and corrected costs are not in this trace.`;
  const drafted = step.confidence.map((c) => c.length);
  const explored = Math.min(drafted.filter((n) => n > 0).length, sum(drafted) - found.kept[best]);
  return numKept - found.kept[best] === explored
    ? `Keeping ${text(best)} has the greatest utility; ${extra} was kept, ${explored} more than pay, to see how drafts fare that are usually cut.`
    : `Keeping ${text(best)} has the greatest utility; ${extra} was kept.`;
}

function candidatesTable(step) {
  const { kept, tokens, ms, best } = step.candidates;
  const numKept = sum(step.kept);
  const utility = kept.map((_, i) => tokens[i] / ms[i]);
  const remark = (i) => [kept[i] === numKept ? "chosen" : "", i === best ? "best" : ""].filter(Boolean).join(", ");
  const heading = step.why === "recomputed" ? "Candidates (recomputed)" : "Candidates";
  const place = el("div", { class: "limited", tabindex: "0", role: "region", "aria-label": heading },
    el("table", {},
      el("thead", {}, el("tr", {}, ...["drafts kept", "expected tokens", "predicted, ms", "tokens per ms", "remark"].map((h) => el("th", { scope: "col", class: h === "remark" ? "text" : null }, h)))),
      el("tbody", {}, ...kept.map((k, i) => el("tr", { class: k === numKept ? "chosen" : null },
        el("td", {}, String(k)), el("td", {}, show(tokens[i], 2)), el("td", {}, show(ms[i], 2)), el("td", {}, show(utility[i], 4)), el("td", { class: "text" }, remark(i)))))));
  requestAnimationFrame(() => {
    const row = place.querySelector("tr.chosen");
    if (row) place.scrollTop = row.offsetTop - place.clientHeight / 2;
  });
  return el("div", {}, el("h3", {}, heading), place);
}

function gainsTable(step) {
  const gains = step.draft_gains;
  const bs = step.kept.length;
  const counts = gains.length === bs ? gains.map((_, i) => i + 1) : [bs];
  const best = gains.indexOf(Math.max(...gains));
  return el("div", {}, el("h3", {}, "Before drafting: for how many requests it was expected to pay"),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Gains of drafting" }, el("table", {},
      el("tbody", {},
        el("tr", {}, el("th", { scope: "row", class: "text" }, "drafting for the best"), ...counts.map((c) => el("td", {}, String(c)))),
        el("tr", {}, el("th", { scope: "row", class: "text" }, "gain over a plain step, tokens"), ...gains.map((g, i) => el("td", {}, i === best ? el("strong", {}, show(g, 2)) : show(g, 2))))))),
    el("p", { class: "note" }, "Expected tokens less the price of the time that drafting and verifying takes; below zero, a plain step earns more."));
}

/** What became of draft `place` (from 1) of a request. */
function fate(place, computed, kept, accepted) {
  if (place <= accepted) return ["accepted", "A"];
  if (place <= kept) return ["rejected", "R"];
  return place <= computed ? ["pruned", "p"] : ["absent", "·"];
}

function blocksTable(step, trace, numbers) {
  const depth = trace.block_size - 1;
  const places = Array.from({ length: depth }, (_, i) => i + 1);
  const number = (value) => (value >= 0.995 ? "99" : String(Math.round(100 * value)));
  const rows = step.kept.map((kept, i) => {
    const confidence = step.confidence[i];
    let survival = 1;
    const cells = places.map((place) => {
      const [state, letter] = fate(place, confidence.length, kept, step.accepted[i]);
      const c = place <= confidence.length ? confidence[place - 1] / 1000 : null;
      if (c !== null) survival *= c;
      const label = c === null || numbers === "state" ? letter : number(numbers === "confidence" ? c : survival);
      const title = `draft ${place}: ${state === "absent" ? "not computed" : state}${c === null ? "" : `, confidence ${c.toFixed(3)}, survival ${survival.toFixed(3)}`}`;
      return el("td", { class: place === kept ? "cut" : null }, el("span", { class: `cell ${state}`, title }, label));
    });
    const name = trace.requests[step.request[i]];
    return el("tr", {},
      el("th", { scope: "row", title: `request ${name}` }, `r${step.request[i] + 1}`),
      el("td", { class: "sum" }, String(step.context[i])),
      el("td", { class: kept === 0 ? "cut" : null }, el("span", { class: "cell anchor", title: "anchor: the last committed token, always verified" }, "a")),
      ...cells,
      el("td", { class: "sum" }, `+${step.accepted[i] + 1}`));
  });
  const head = ["", "ctx", "0", ...places.map(String), "out"];
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests and positions" },
    el("table", { class: "blocks" },
      el("thead", {}, el("tr", {}, ...head.map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", {}, ...rows)));
}

function blocksKey(step) {
  const item = (state, letter, text) => el("span", { class: "item" }, el("span", { class: `cell ${state}` }, letter), text);
  return el("div", { class: "key" },
    item("anchor", "a", "anchor"), item("accepted", "A", "kept and accepted"), item("rejected", "R", "kept, rejected"),
    item("pruned", "p", "pruned"), item("absent", "·", "not computed"),
    el("span", {}, `vertical line: the cut; ctx: committed tokens; out: tokens emitted; blocks of ${step.block_size}`));
}
