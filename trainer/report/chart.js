"use strict";
/* Charts as inline SVG. Text enters the page by textContent alone. */

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 58, right: 18, top: 12, bottom: 34 };
const HEIGHT = 210;
const MOST_ALARM_LINES = 80;

/** An HTML element; children are elements or texts. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A number as a person writes it: four digits, powers of ten where it is far from 1. */
function shown(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

/** A tick: no more digits than tell it from its neighbours. */
function tickText(value) {
  if (Math.abs(value) >= 1e4 && Math.abs(value) < 1e9) return value >= 1e6 ? `${value / 1e6}M` : `${value / 1e3}k`;
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9 ? shown(value) : String(value);
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / 6));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    if (power % every) continue;
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(6));
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

/** Place of a value on an axis, in pixels. */
function scaleOf(domain, from, to, log) {
  const [low, high] = log ? domain.map(Math.log10) : domain;
  return (value) => from + (((log ? Math.log10(value) : value) - low) / (high - low || 1)) * (to - from);
}

/** First and last step of all charts, so that they can be read one under the other. */
function stepsOf(charts) {
  const ends = charts.flatMap((chart) => [...chart.series, ...chart.points]).flatMap((one) => [one.s[0], (one.e || one.s).at(-1)]);
  return [Math.min(...ends), Math.max(...ends)];
}

/** What the values of a chart span, extremes and errors included; log where they spread over decades. */
function spanOf(chart) {
  const values = chart.series.flatMap((one) => one.m.concat(one.lo || [], one.hi || []));
  for (const one of chart.points) one.m.forEach((mean, at) => values.push(mean - one.error[at], mean + one.error[at]));
  values.sort((a, b) => a - b);
  const positive = values.filter((value) => value > 0);
  const of = (share) => positive[Math.floor(share * (positive.length - 1))];
  const log = values[0] >= 0 && positive.length > 0.8 * values.length && of(0.95) > 30 * of(0.05);
  let [low, high] = log ? [positive[0], positive.at(-1)] : [values[0], values.at(-1)];
  if (log) return { y: [low / 1.15, high * 1.15], log };
  if (low >= 0 && low < 0.55 * high) low = 0;
  const pad = Math.max((high - low) * 0.06, Math.abs(high) * 0.01) || 0.05;
  return { y: [low === 0 ? 0 : low - pad, high + pad], log };
}

/** Index of the point nearest to a step. */
function nearest(series, step) {
  let low = 0, high = series.s.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (series.s[middle] <= step) low = middle; else high = middle;
  }
  return step - series.s[low] <= series.s[high] - step ? low : high;
}

/** Where a point lies on the x axis: in the middle of its bucket. */
function place(series, at) {
  return series.e ? (series.s[at] + series.e[at]) / 2 : series.s[at];
}

function valueText(series, at) {
  if (series.error) return shown(series.m[at]) + (series.error[at] ? " ± " + shown(series.error[at]) : "");
  if (!series.e || series.lo[at] === series.hi[at]) return shown(series.m[at]);
  return `${shown(series.m[at])} (${shown(series.lo[at])} to ${shown(series.hi[at])})`;
}

/** All charts of the page follow one cursor: a step, or null. */
const cursor = {
  charts: [],
  move(step, source) {
    for (const chart of this.charts) chart.show(step, chart === source);
  },
};

class Chart {
  /** spec: title, unit, series, points, fits, steps (first and last); alarms: of all runs; label: words of a series. */
  constructor(spec, alarms, label) {
    Object.assign(this, { spec, alarms, label });
    this.all = [...spec.series, ...spec.points];
    this.legend = el("ul", { class: "legend" });
    this.values = this.all.map((one, at) => {
      const value = el("b");
      this.legend.append(el("li", {}, el("span", { class: `swatch ${one.error ? "points" : ""} c${this.color(at)}` }), label(one), value));
      return value;
    });
    this.tip = el("div", { class: "tip", role: "status", hidden: "" });
    this.hit = el("div", { class: "hit" });
    this.plot = el("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${spec.title}: values by arrow keys` });
    this.note = el("span", { class: "unit" });
    this.figure = el("figure", {}, el("figcaption", {}, el("span", { text: spec.title }), this.note), this.legend, this.plot);
    this.listen();
    cursor.charts.push(this);
  }

  color(at) {
    const one = this.all[at];
    return (this.spec.several && !one.error ? one.run : at) % 8;
  }

  listen() {
    const moved = (event) => {
      const box = this.hit.getBoundingClientRect();
      const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
      const [first, last] = this.domain.x;
      cursor.move(Math.round(Math.min(1, Math.max(0, share)) * (last - first) + first), this);
    };
    this.hit.addEventListener("pointermove", moved);
    this.hit.addEventListener("pointerdown", moved);
    this.hit.addEventListener("pointerleave", () => cursor.move(null, this));
    this.plot.addEventListener("blur", () => cursor.move(null, this));
    this.plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      const base = this.all[0];
      const from = this.step === null || this.step === undefined ? (by > 0 ? -1 : base.s.length) : nearest(base, this.step);
      cursor.move(base.s[Math.min(base.s.length - 1, Math.max(0, from + by))], this);
    });
  }

  draw() {
    const width = Math.max(280, this.plot.clientWidth || 560);
    this.domain = { x: this.spec.steps, ...spanOf(this.spec) };
    const { x, y, log } = this.domain;
    this.x = scaleOf(x, MARGIN.left, width - MARGIN.right, false);
    this.y = scaleOf(y, HEIGHT - MARGIN.bottom, MARGIN.top, log);
    this.note.textContent = log ? "log scale" : "";
    const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img" }, svg("title", { text: this.summary() }));
    this.axes(root, width);
    for (const alarm of this.alarms.slice(0, MOST_ALARM_LINES)) this.alarmLine(root, alarm);
    this.all.forEach((one, at) => this.curve(root, one, this.color(at)));
    for (const fit of this.spec.fits || []) {
      root.append(svg("path", { class: "fit", d: fit.map(([step, value], at) => `${at ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`).join("") }));
    }
    this.line = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    root.append(this.line);
    this.plot.replaceChildren(root, this.hit, this.tip);
    this.width = width;
    this.show(null, false);
  }

  summary() {
    const [first, last] = this.domain.x;
    const parts = this.all.slice(0, 8).map((one) => {
      const low = Math.min(...(one.lo || one.m)), high = Math.max(...(one.hi || one.m));
      return `${this.label(one)}: last ${shown(one.m.at(-1))}, lowest ${shown(low)}, highest ${shown(high)}`;
    });
    return `${this.spec.title}, ${this.spec.unit}, steps ${first} to ${last}. ${parts.join("; ")}`;
  }

  axes(root, width) {
    const bottom = HEIGHT - MARGIN.bottom;
    const { x, y, log } = this.domain;
    for (const tick of log ? logTicks(...y) : linearTicks(...y, 4)) {
      const at = this.y(tick);
      root.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
      root.append(svg("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end", text: tickText(tick) }));
    }
    const ticks = x[0] === x[1] ? [x[0]] : linearTicks(...x, Math.max(2, Math.floor(width / 70))).filter(Number.isInteger);
    for (const tick of ticks) {
      root.append(svg("line", { class: "axis", x1: this.x(tick), x2: this.x(tick), y1: bottom, y2: bottom + 4 }));
      root.append(svg("text", { x: this.x(tick), y: bottom + 16, "text-anchor": "middle", text: tickText(tick) }));
    }
    root.append(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }));
    root.append(svg("text", { x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end", text: "step" }));
    const middle = (bottom + MARGIN.top) / 2;
    root.append(svg("text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})`, text: this.spec.unit }));
  }

  alarmLine(root, alarm) {
    const [first, last] = this.domain.x;
    if (alarm.step < first || alarm.step > last) return;
    const own = this.spec.series.some((one) => alarm.signal && one.key === alarm.signal);
    const at = this.x(alarm.step);
    root.append(svg("line", { class: own ? "alarm own" : "alarm", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    if (own) root.append(svg("path", { class: "flag", d: `M${at - 4} ${MARGIN.top - 7}h8l-4 7z` }));
  }

  curve(root, one, color) {
    const spot = (value, at) => `${this.x(place(one, at)).toFixed(1)} ${this.y(value).toFixed(1)}`;
    const drawn = (value) => !this.domain.log || value > 0;
    if (one.error) {
      one.m.forEach((mean, at) => {
        const x = this.x(one.s[at]);
        if (!drawn(mean - one.error[at])) return;
        root.append(svg("line", { class: `error c${color}`, x1: x, x2: x, y1: this.y(mean - one.error[at]), y2: this.y(mean + one.error[at]) }));
        root.append(svg("circle", { class: `dot c${color}`, cx: x, cy: this.y(mean), r: 3.6 }));
      });
      return;
    }
    if (one.e) {
      const floor = this.domain.y[0];
      const up = one.hi.map((value, at) => spot(drawn(value) ? value : floor, at));
      const down = one.lo.map((value, at) => spot(drawn(value) ? value : floor, at)).reverse();
      root.append(svg("path", { class: `band c${color}`, d: `M${[...up, ...down].join("L")}Z` }));
    }
    let path = "", pen = "M";
    one.m.forEach((value, at) => {
      if (drawn(value)) { path += pen + spot(value, at); pen = "L"; } else pen = "M";
    });
    root.append(svg("path", { class: `line c${color}`, d: path }));
    if (one.m.length === 1) root.append(svg("circle", { class: `dot c${color}`, cx: this.x(one.s[0]), cy: this.y(one.m[0]), r: 3 }));
  }

  /** Values at a step, or the last ones. The tip is shown where the pointer or the focus is. */
  show(step, here) {
    if (!this.line) return;
    this.step = step;
    const at = this.all.map((one) => (step === null ? one.s.length - 1 : nearest(one, step)));
    this.values.forEach((value, n) => { value.textContent = this.all[n].error ? valueText(this.all[n], at[n]) : shown(this.all[n].m[at[n]]); });
    this.tip.hidden = step === null || !here;
    this.line.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step === null) return;
    const x = Math.min(this.width - MARGIN.right, Math.max(MARGIN.left, this.x(step)));
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
    if (here) this.point(step, at, x);
  }

  point(step, at, x) {
    const base = this.all[0], first = base.s[at[0]], last = (base.e || base.s)[at[0]];
    this.tip.replaceChildren(el("div", {}, el("strong", { text: first === last ? `step ${first}` : `steps ${first} to ${last}` })));
    this.all.forEach((one, n) => {
      this.tip.append(el("div", {}, el("span", { class: `swatch c${this.color(n)}` }), this.label(one), el("b", { text: valueText(one, at[n]) })));
    });
    const near = Math.max(1, (this.domain.x[1] - this.domain.x[0]) / 150);
    for (const alarm of this.alarms.filter((one) => Math.abs(one.step - step) <= near).slice(0, 3)) {
      this.tip.append(el("div", { class: "alarm-text", text: `alarm at ${alarm.step}: ${[alarm.signal, alarm.cause || alarm.message].filter(Boolean).join(", ")}`.slice(0, 160) }));
    }
    const box = this.plot.getBoundingClientRect();
    const scale = box.width / this.width;
    const left = x * scale;
    this.tip.style.left = left > box.width * 0.55 ? "" : `${left + 12}px`;
    this.tip.style.right = left > box.width * 0.55 ? `${box.width - left + 12}px` : "";
    this.tip.style.top = "14px";
  }
}
