"use strict";
// Elements, numbers, colours and the one way to draw a chart. All text goes in as text, never as
// markup: names of arms, files and requests come from outside.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** An element: attributes, "on..." handlers and properties by name, then children. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => sum(values) / values.length;
const unique = (values) => [...new Set(values)];

/** A measured number with three significant digits or more, "–" where there is none. */
function show(value, digits) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  return value.toFixed(digits ?? (size >= 100 ? 0 : size >= 10 ? 1 : 2)).replace("-", "\u2212");
}

/** A counted number, or another as above. */
const count = (value) => (Number.isInteger(value) ? String(value) : show(value));

const percent = (value) => (isNumber(value) ? `${Math.round(100 * value)} %` : "–");

function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) {
    const name = key(item);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(item);
  }
  return groups;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Plotly takes some tags in its texts for markup; nothing of ours is. */
const literal = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/** Unpack the plotting library, which lies in the page gzipped. */
async function loadPlotly() {
  const packed = document.getElementById("plotly");
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack gzip (DecompressionStream); any of 2023 or later can");
  }
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  packed.remove();
}

/** A chart's place: heading, drawing, caption. `summary` is what a screen reader says of it. */
function chartFigure(id, heading, summary, short = false) {
  const place = el("div", { id, class: short ? "chart short" : "chart", role: "img", "aria-label": summary });
  return el("figure", {}, el("h3", {}, heading), place, el("figcaption", { id: `${id}-note` }));
}

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 8 }, gridcolor: color("grid"), zerolinecolor: color("line"),
    linecolor: color("line"), automargin: true, ...more,
  };
}

/** A logarithmic axis with ticks at the given values, which are loads or batch sizes. */
function loadAxis(title, values) {
  const ticks = unique(values).sort((a, b) => a - b);
  const marks = ticks.length > 10 ? ticks.filter((tick) => Number.isInteger(Math.log2(tick))) : ticks;
  return axis(title, { type: "log", tickvals: marks, ticktext: marks.map(String) });
}

function note(id, text) {
  document.getElementById(`${id}-note`).textContent = text;
}

/** Draw, or draw again. Without any point the place says so. */
function draw(id, series, layout, caption = "") {
  const place = document.getElementById(id);
  const figure = place.parentElement;
  figure.hidden = false;
  const isEmpty = !series.some((s) => (s.x && s.x.length) || (s.z && s.z.length));
  const narrow = window.innerWidth <= 480;
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const ink = { color: color("ink"), size: narrow ? 11 : 12, family: "system-ui, sans-serif" };
  Plotly.react(
    place,
    series,
    {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: ink,
      margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "closest", dragmode: touch ? false : "zoom",
      legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top", font: { size: narrow ? 10 : 11 } },
      hoverlabel: { align: "left", font: { family: "system-ui, sans-serif", size: 12 } },
      annotations: isEmpty
        ? [{ text: "nothing to show with these filters", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }]
        : [],
      ...layout,
    },
    { displayModeBar: false, responsive: true },
  );
  note(id, caption);
}
