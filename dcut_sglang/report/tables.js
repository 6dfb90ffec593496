"use strict";
// Tables: conditions, and rows with headings to sort by.

/**
 * A table that scrolls by itself. A column is {name, value(item), text?(item), isText?, isCount?, wide?};
 * columns without any value are left out.
 */
function sortableTable(caption, columns, items, onSort, order) {
  const used = columns.filter((c) => items.some((item) => {
    const value = c.value(item);
    return value !== null && value !== undefined && value !== "";
  }));
  const heading = (c) => {
    const sorted = order && order.name === c.name ? (order.down ? "descending" : "ascending") : null;
    const label = onSort ? el("button", { type: "button", onclick: () => onSort(c) }, c.name) : c.name;
    return el("th", { scope: "col", class: c.isText ? "text" : null, "aria-sort": sorted }, label,
      sorted ? (order.down ? " ▾" : " ▴") : "");
  };
  const cell = (c, item) => el(
    "td",
    { class: [c.isText ? "text" : "", c.wide ? "wide" : ""].join(" ").trim() || null },
    c.text ? c.text(item) : c.isText ? String(c.value(item) ?? "–") : (c.isCount ? count : show)(c.value(item)),
  );
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {},
      el("thead", {}, el("tr", {}, ...used.map(heading))),
      el("tbody", {}, ...items.map((item) => el("tr", {}, ...used.map((c) => cell(c, item)))))));
}

function conditionsTable(conditions) {
  const text = (name, key, more = {}) => ({ name, value: (c) => c[key] ?? "", isText: true, ...more });
  return sortableTable("Conditions of the rows", [
    text("file", "source"), text("benchmark", "benchmark"), text("model pair", "pair"),
    text("commit", "commit"), text("last row (UTC)", "last"), { name: "rows", value: (c) => c.rows, isCount: true },
    text("machine", "machine"), text("device", "device"), text("dtype", "dtype"),
    { name: "threads", value: (c) => c.threads, isCount: true }, text("SGLang", "sglang"), text("torch", "torch"),
    { name: "tokens per request", value: (c) => c.tokens, isCount: true },
    text("flags of all arms", "flags", { wide: true }), text("command", "command", { wide: true }),
  ], conditions);
}

const ROW_COLUMNS = [
  { name: "arm", value: (r) => r.arm, isText: true },
  { name: "prompts", value: (r) => r.prompts, isText: true },
  { name: "file", value: (r) => r.source, isText: true },
  { name: "concurrency", value: (r) => r.concurrency, isCount: true },
  { name: "requests/s", value: (r) => r.request_rate, isCount: true },
  { name: "tokens/s", value: (r) => r.rate },
  { name: "tokens/CPU-s", value: (r) => r.cpuRate },
  { name: "over plain", value: (r) => r.speedup, text: (r) => (isNumber(r.speedup) ? `${show(r.speedup, 2)} ×` : "–") },
  { name: "tokens/s per request", value: (r) => r.user },
  { name: "TTFT p50, ms", value: (r) => r.ttft },
  { name: "ms per token p50", value: (r) => r.tpot },
  { name: "accept length, tokens", value: (r) => r.accept_length },
  { name: "rows/step", value: (r) => r.rows_per_step },
  { name: "keep ratio", value: (r) => r.keep_ratio, text: (r) => show(r.keep_ratio, 2) },
  { name: "plain steps", value: (r) => r.plain_share, text: (r) => percent(r.plain_share) },
  { name: "predicted, ms/step", value: (r) => r.predicted_ms },
  { name: "measured, ms/step", value: (r) => r.measured_ms },
  { name: "outputs equal to plain", value: (r) => (r.equal ? r.equal[0] : null), text: (r) => (r.equal ? `${r.equal[0]} of ${r.equal[1]}` : "–") },
];

let rowOrder = { name: "concurrency", down: false };

function drawRowTable(place, points) {
  const column = ROW_COLUMNS.find((c) => c.name === rowOrder.name);
  const sign = rowOrder.down ? -1 : 1;
  const sorted = [...points].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return sign * (x < y ? -1 : 1);
  });
  const onSort = (c) => {
    rowOrder = { name: c.name, down: rowOrder.name === c.name && !rowOrder.down };
    drawRowTable(place, points);
    const again = [...place.querySelectorAll("th button")].find((b) => b.textContent === c.name);
    if (again) again.focus();
  };
  place.replaceChildren(sortableTable("Rows, one per arm and load", ROW_COLUMNS, sorted, onSort, rowOrder));
}
