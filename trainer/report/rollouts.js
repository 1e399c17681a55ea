/* The table of rollouts: filter, order, open. */

const ROWS_A_PAGE = 25;
const ORDERS = {
  "worst reward first": (a, b) => order(a.reward, b.reward) || b.marked - a.marked,
  "best reward first": (a, b) => order(a.reward, b.reward, -1) || a.marked - b.marked,
  "most garbled first": (a, b) => b.marked - a.marked || order(a.reward, b.reward),
  "latest step first": (a, b) => b.step - a.step || a.group - b.group || a.index - b.index,
  "earliest step first": (a, b) => a.step - b.step || a.group - b.group || a.index - b.index,
  "longest first": (a, b) => (b.tokens || 0) - (a.tokens || 0),
};

/** The unscored come last, whichever way the others are ordered. */
function order(a, b, way = 1) {
  if (a === null || b === null) return (a === null) - (b === null);
  return way * (a - b);
}

function textOf(parts) {
  return parts.map(([, text]) => text).join("");
}

/** Pieces of a text as nodes: garbled ones marked, with their kind as a title. */
function pieces(parts) {
  const names = { replacement: "characters that are no valid UTF-8", marker: "raw tokenizer marks", loop: "repeats itself", control: "invisible character, shown as its escape" };
  return parts.map(([kind, text]) => {
    if (!kind) return document.createTextNode(text);
    if (kind === "cut") return el("span", { class: "cut", text: ` ${text} ` });
    return el("mark", { class: kind, title: names[kind] || kind, text });
  });
}

class Rollouts {
  constructor(rows, runs) {
    this.rows = rows;
    this.runs = runs;
    for (const row of rows) {
      row.promptText = textOf(row.prompt);
      row.completionText = textOf(row.completion);
      row.lower = `${row.promptText}\n${row.completionText}`.toLowerCase();
    }
    this.page = 0;
    this.body = el("tbody");
    this.count = el("span", { class: "soft small", role: "status" });
    this.root = el("div", {}, this.controls(), this.table(), this.pager());
    this.update();
  }

  controls() {
    const number = (label, step) => {
      const input = el("input", { type: "number", step });
      return [el("label", {}, label, input), input];
    };
    const made = { minStep: number("from step", "1"), maxStep: number("to step", "1"), minReward: number("reward from", "any"), maxReward: number("reward to", "any") };
    this.inputs = Object.fromEntries(Object.entries(made).map(([name, [, input]]) => [name, input]));
    this.inputs.text = el("input", { type: "search", placeholder: "in prompt or completion" });
    this.inputs.order = el("select", {}, ...Object.keys(ORDERS).map((name) => el("option", { text: name })));
    this.inputs.garbled = el("input", { type: "checkbox" });
    this.inputs.run = el("select", {}, el("option", { value: "", text: "all" }), ...this.runs.map((run, at) => el("option", { value: at, text: run.name })));
    for (const input of Object.values(this.inputs)) input.addEventListener("input", () => { this.page = 0; this.update(); });
    const { text, order: by, garbled, run } = this.inputs;
    const controls = el("div", { class: "controls" }, el("label", {}, "order", by), ...Object.values(made).map(([label]) => label), el("label", {}, "text", text), el("label", { class: "inline" }, garbled, "garbled only"));
    if (this.runs.length > 1) controls.prepend(el("label", {}, "run", run));
    return controls;
  }

  table() {
    const columns = [["", "2%"], ...(this.runs.length > 1 ? [["run", "10%"]] : []), ["step", "6%"], ["group", "6%"], ["reward", "7%"], ["advantage", "7%"], ["tokens", "7%"], ["end", "6%"], ["garbled", "7%"], ["prompt", "26%"], ["completion", ""]];
    const numeric = new Set(["step", "group", "reward", "advantage", "tokens", "garbled"]);
    const head = columns.map(([name, width]) => {
      const cell = el("th", { scope: "col", class: numeric.has(name) ? "num" : null, text: name });
      cell.style.width = width;
      return cell;
    });
    this.width = columns.length;
    return el("div", { class: "scroll" }, el("table", { class: "rollouts" }, el("thead", {}, el("tr", {}, ...head)), this.body));
  }

  pager() {
    this.before = el("button", { class: "plain", type: "button", text: "previous" });
    this.after = el("button", { class: "plain", type: "button", text: "next" });
    this.before.addEventListener("click", () => { this.page -= 1; this.update(); });
    this.after.addEventListener("click", () => { this.page += 1; this.update(); });
    return el("div", { class: "controls" }, this.before, this.after, this.count);
  }

  wanted() {
    const bound = (input, otherwise) => (input.value === "" ? otherwise : Number(input.value));
    const { minStep, maxStep, minReward, maxReward, text, garbled, run } = this.inputs;
    const [first, last] = [bound(minStep, -Infinity), bound(maxStep, Infinity)];
    const [low, high] = [bound(minReward, -Infinity), bound(maxReward, Infinity)];
    const rewarded = minReward.value !== "" || maxReward.value !== "";
    const words = text.value.toLowerCase();
    return this.rows.filter((row) =>
      row.step >= first && row.step <= last && (!rewarded || (row.reward !== null && row.reward >= low && row.reward <= high)) &&
      (!words || row.lower.includes(words)) && (!garbled.checked || row.marked > 0) && (run.value === "" || row.run === Number(run.value)));
  }

  update() {
    const found = this.wanted().sort(ORDERS[this.inputs.order.value]);
    const pages = Math.max(1, Math.ceil(found.length / ROWS_A_PAGE));
    this.page = Math.min(this.page, pages - 1);
    const start = this.page * ROWS_A_PAGE;
    this.body.replaceChildren(...found.slice(start, start + ROWS_A_PAGE).flatMap((row) => this.line(row)));
    this.before.disabled = this.page === 0;
    this.after.disabled = this.page === pages - 1;
    this.count.textContent = found.length ? `${start + 1} to ${Math.min(found.length, start + ROWS_A_PAGE)} of ${found.length}` : "none";
  }

  line(row) {
    const open = el("button", { class: "open", type: "button", "aria-expanded": "false", "aria-label": `step ${row.step}, group ${row.group}, completion ${row.index}: whole text`, text: "▸" });
    const cell = (text, kind) => el("td", { class: kind, text });
    const brief = (parts) => el("td", { class: "text" }, el("bdi", {}, ...pieces(clipped(parts, 160))));
    const line = el("tr", { class: "row" }, el("td", {}, open),
      ...(this.runs.length > 1 ? [cell(this.runs[row.run].name, "text")] : []),
      cell(row.step, "num"), cell(`${row.group}.${row.index}`, "num"), cell(row.reward === null ? "unscored" : shown(row.reward), "num"),
      cell(row.advantage === null ? "–" : row.advantage.toFixed(2), "num"), cell(shown(row.tokens), "num"), cell(row.finish, null),
      cell(row.marked ? `${(100 * row.marked).toFixed(0)} %` : "", "num"), brief(row.prompt), brief(row.completion));
    const detail = el("tr", { hidden: "" });
    line.addEventListener("click", () => {
      if (!detail.firstChild) detail.append(el("td", { colspan: this.width }, this.detail(row)));
      detail.hidden = !detail.hidden;
      open.setAttribute("aria-expanded", String(!detail.hidden));
      open.textContent = detail.hidden ? "▸" : "▾";
    });
    return [line, detail];
  }

  detail(row) {
    const rewards = Object.entries(row.rewards).map(([name, value]) => `${name} ${value === null ? "unscored" : shown(value)}`).join(", ");
    const facts = [rewards, `advantage ${shown(row.advantage)}`, `row ${row.row} of the data`, row.finish === "length" ? "cut off" : "ended by itself"].filter(Boolean).join(" · ");
    const box = el("div", { class: "detail" },
      el("div", {}, el("h4", { text: "prompt" }), el("pre", { class: "said", dir: "auto" }, ...pieces(row.prompt))),
      el("div", {}, el("h4", { text: `completion · ${facts}` }), el("pre", { class: "said", dir: "auto" }, ...pieces(row.completion))));
    if (row.columns) box.append(el("div", { class: "mono soft", text: row.columns }));
    return box;
  }
}

/** The beginning of a text of pieces, newlines shown. */
function clipped(parts, most) {
  const kept = [];
  for (const [kind, text] of parts) {
    const part = text.slice(0, most).replaceAll("\n", "⏎");
    if (part) kept.push([kind, part]);
    most -= part.length;
    if (most <= 0) break;
  }
  return kept;
}
