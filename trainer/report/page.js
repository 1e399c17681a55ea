/* The page from its data. */

const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
const main = document.getElementById("main");

function section(title, ...children) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  main.append(el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title`, text: title }), ...children));
  contents.append(el("li", {}, el("a", { href: `#${id}`, text: title })));
}

function notes(lines) {
  return lines.length ? el("div", { class: "note" }, el("ul", {}, ...lines.map((line) => el("li", { text: line })))) : "";
}

/** A heading for one of several runs. */
function named(run, node) {
  return several ? el("div", {}, el("h3", { text: run.name }), node) : node;
}

function head(run, at) {
  const { status, last, steps } = run;
  const state = status.state || "unknown";
  const tile = (name, value) => (value === undefined ? "" : el("div", { class: "tile" }, el("dt", { text: name }), el("dd", { text: typeof value === "number" ? shown(value) : value })));
  const percent = (share) => (share === undefined ? undefined : `${(100 * share).toFixed(1)} %`);
  return el("div", { class: "run" },
    el("div", { class: "run-name" }, several ? el("span", { class: `swatch c${at % 8}` }) : "", el(several ? "strong" : "h1", { text: run.name }), el("span", { class: `state ${/^[a-z]+$/.test(state) ? state : ""}`, text: state }), el("span", { class: "soft small", text: status.reason || "" })),
    el("p", { class: "soft small", text: [run.path, status.run_id && `run ${status.run_id}`, status.updated && `updated ${status.updated}`].filter(Boolean).join(" · ") }),
    el("dl", { class: "tiles" }, tile("steps", steps ? steps[1] : 0), tile("reward", last.reward_mean), tile("KL, nats per token", last.kl), tile("entropy, nats", last.entropy), tile("garble", percent(last.garble_rate)), tile("length, tokens", last.completion_tokens_mean), tile("cut off", percent(last.truncated_fraction)), tile("gradient norm", last.grad_norm), tile("tokens per second", last.tokens_per_second), tile("peak memory, GiB", last.peak_memory_gib), tile("alarms", run.alarms.filter((alarm) => !alarm.event || alarm.event === "raised").length)));
}

/** A lane a signal, a mark an alarm; below them a table. */
function alarmSection() {
  const all = data.runs.flatMap((run, at) => run.alarms.map((alarm) => ({ ...alarm, run: at })));
  if (!all.length) return el("p", { class: "soft", text: "No alarm was recorded." });
  const columns = [["step", "step"], ...(several ? [["run", "run"]] : []), ["alarm", "alarm"], ["event", "event"], ["signal", "signal"], ["message", "what was seen"], ["cause", "suspected cause"], ["fix", "what to do"], ["count", "times"], ["more", "evidence"]].filter(([key]) => key === "step" || key === "run" || all.some((alarm) => alarm[key]));
  const lines = all.map((alarm) => el("tr", {}, ...columns.map(([key]) => {
    if (key === "step") return el("td", { class: "num alarm-step", text: alarm.step });
    if (key === "run") return el("td", { text: data.runs[alarm.run].name });
    if (key === "more" && alarm.more) return el("td", {}, el("details", {}, el("summary", { text: "show" }), el("pre", { class: "said", text: alarm.more })));
    return el("td", { text: alarm[key] || "" });
  })));
  return el("div", {}, timeline(all), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...columns.map(([key, name]) => el("th", { scope: "col", class: key === "step" ? "num" : null, text: name })))), el("tbody", {}, ...lines))));
}

function timeline(alarms) {
  const holder = el("div", { class: "plot" });
  const lanes = [...new Set(alarms.map((alarm) => alarm.signal || "alarm"))].slice(0, 12);
  const steps = data.runs.flatMap((run) => (run.steps ? run.steps.slice(0, 2) : []));
  drawers.push(() => {
    const width = Math.max(280, holder.clientWidth || 1100), left = 150, height = 22 * lanes.length + 26, bottom = height - 20;
    const x = scaleOf([Math.min(...steps), Math.max(...steps)], left, width - 24, false);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" }, svg("title", { text: `Alarms by step: ${lanes.join(", ")}` }));
    lanes.forEach((lane, at) => {
      root.append(svg("text", { x: left - 10, y: 22 * at + 15, "text-anchor": "end", text: lane.slice(0, 22) }));
      root.append(svg("line", { class: "grid", x1: left, x2: width - 24, y1: 22 * at + 11, y2: 22 * at + 11 }));
    });
    for (const alarm of alarms) {
      const lane = lanes.indexOf(alarm.signal || "alarm");
      if (lane < 0) continue;
      const mark = svg("circle", { class: alarm.event === "cleared" ? "cleared" : "flag", cx: x(alarm.step), cy: 22 * lane + 11, r: 5 });
      mark.append(svg("title", { text: `step ${alarm.step}: ${alarm.event || ""} ${alarm.cause || alarm.message || ""}`.slice(0, 200) }));
      root.append(mark);
    }
    for (const tick of linearTicks(Math.min(...steps), Math.max(...steps) || 1, Math.floor(width / 120)).filter(Number.isInteger)) root.append(svg("text", { x: x(tick), y: bottom + 14, "text-anchor": "middle", text: shown(tick) }));
    root.append(svg("text", { x: left - 10, y: bottom + 14, "text-anchor": "end", text: "step" }));
    holder.replaceChildren(root);
  });
  return holder;
}

function curveSection() {
  const box = el("div");
  const alarms = data.runs.flatMap((run) => run.alarms.filter((alarm) => alarm.event !== "cleared"));
  const steps = data.charts.length ? stepsOf(data.charts) : [];
  const label = (one) => (!several ? one.key : one.error ? `${data.runs[one.run].name}, ${one.key}` : data.runs[one.run].name);
  for (const group of [...new Set(data.charts.map((chart) => chart.group))]) {
    const grid = el("div", { class: "charts" });
    for (const spec of data.charts.filter((chart) => chart.group === group)) {
      const isReward = spec.series.some((one) => one.key === "reward_mean");
      const fits = isReward && !several ? data.runs[0].signature.phases.map(([, first, last, from, to]) => [[first, from], [last, to]]) : [];
      const chart = new Chart({ ...spec, several, fits, steps }, alarms, label);
      drawers.push(() => chart.draw());
      grid.append(chart.figure);
    }
    box.append(el("h3", { text: group }), grid);
  }
  const long = data.charts.some((chart) => chart.series.some((one) => one.e));
  const phases = !several && data.runs[0].signature.phases.length;
  const said = ["Move over a chart, or focus it and use the arrow keys: every chart shows its values of that step."];
  if (long) said.push("Long curves are shown in buckets of steps: the line is a bucket's mean, the band its lowest and highest value.");
  if (phases) said.push("Dashed in the reward's chart: the phases that are named under Shape of the reward curve.");
  return data.charts.length ? el("div", {}, notes(said), box) : el("p", { class: "soft", text: "No step is done yet." });
}

function signatureSection() {
  return el("div", {}, ...data.runs.map((run) => {
    const { words, numbers, phases } = run.signature;
    const lines = phases.map(([kind, first, last, from, to]) => `${kind}, steps ${first} to ${last}: ${shown(Number(from.toPrecision(3)))} to ${shown(Number(to.toPrecision(3)))}`);
    return named(run, el("div", {}, el("p", { class: "words", text: words }), notes([...lines, ...numbers])));
  }), el("p", { class: "soft small", text: "For information, it decides nothing: a healthy run may have any of these shapes." }));
}

function histogramSection(run) {
  const slider = el("input", { type: "range", min: 0, max: run.histograms.length - 1, value: run.histograms.length - 1, "aria-label": "step of the histogram" });
  const title = el("span"), plot = el("div", { class: "plot" }), readings = el("div");
  const draw = () => {
    const record = run.histograms[Number(slider.value)];
    title.textContent = `step ${record.step}: ${shown(record.tokens)} response tokens, mean ${shown(record.mean)}, std ${shown(record.std)}, max ${shown(record.max)} nats`;
    plot.replaceChildren(histogram(record, Math.max(280, plot.clientWidth || 1100)));
    readings.replaceChildren(notes((record.readings || []).map((one) => `${one.reading}: ${one.holds ? "yes" : "no"} (${one.numbers}). ${one.fact}`)));
  };
  slider.addEventListener("input", draw);
  drawers.push(draw);
  return el("figure", {}, el("figcaption", {}, title, el("span", { class: "unit", text: "share of tokens by nats" })), run.histograms.length > 1 ? slider : "", plot, readings);
}

function settingsSection() {
  const file = (name, text) => el("details", {}, el("summary", { text: name }), el("pre", { class: "file", text: text || "not there" }));
  return el("div", {}, ...data.runs.map((run) => named(run, el("div", {}, file("config.toml, with every default filled in", run.config), file("environment.json", run.environment)))));
}

const contents = el("ul");
const drawers = [];
const top_ = document.getElementById("top");
document.title = `${data.runs.map((run) => run.name).join(", ")} · zero-grpo`;
if (several) top_.append(el("h1", { text: `${data.runs.length} runs` }));
top_.append(...data.runs.map(head));
document.getElementById("contents").append(contents);

section("Alarms", alarmSection());
section("Curves", curveSection());
section("Shape of the reward curve", signatureSection());
const withHistograms = data.runs.filter((run) => run.histograms.length);
if (withHistograms.length) section("KL of single tokens", ...withHistograms.map((run) => named(run, histogramSection(run))));
const left = data.runs.flatMap((run) => run.notes.map((note) => (several ? `${run.name}: ${note}` : note)));
section("Rollouts", data.rollouts.length ? new Rollouts(data.rollouts, data.runs).root : el("p", { class: "soft", text: "No rollouts were recorded." }), notes(left));
section("Settings and environment", settingsSection());
main.after(el("footer", { text: `Made ${data.made} from what the run had written by then. Nothing on this page is loaded from elsewhere.` }));

const drawAll = () => drawers.forEach((draw) => draw());
drawAll();
let drawnWidth = window.innerWidth, waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (window.innerWidth !== drawnWidth) { drawnWidth = window.innerWidth; drawAll(); } }, 120);
});
