/* The KL of single tokens as bars. */

/** Counts between edges as bars over a log axis; the bin around 0 stands at its left end. */
function histogram(record, width) {
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img" });
  const { edges, counts } = record;
  const used = counts.map((count, at) => [count, at]).filter(([count]) => count > 0).map(([, at]) => at);
  if (!used.length) return root;
  const from = used[0], to = used.at(-1) + 1, most = Math.max(...counts), bottom = HEIGHT - MARGIN.bottom;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const x = scaleOf([from, to], MARGIN.left, width - MARGIN.right, false);
  const y = scaleOf([0, most / total * 1.05], bottom, MARGIN.top, false);
  root.append(svg("title", { text: `KL of single tokens at step ${record.step}: share of tokens by nats` }));
  for (const tick of linearTicks(0, most / total * 1.05, 4)) {
    root.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }));
    root.append(svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end", text: tickText(tick) }));
  }
  for (let at = from; at < to; at++) {
    if (!counts[at]) continue;
    const bar = svg("rect", { class: "bar c0", x: x(at) + 0.5, width: Math.max(1, x(at + 1) - x(at) - 1), y: y(counts[at] / total), height: bottom - y(counts[at] / total) });
    bar.append(svg("title", { text: `${shown(edges[at])} to ${shown(edges[at + 1])} nats: ${counts[at].toLocaleString("en")} tokens, ${(100 * counts[at] / total).toFixed(1)} %` }));
    root.append(bar);
  }
  let room = -Infinity;
  for (let at = from; at <= to; at++) {
    const power = Math.log10(Math.abs(edges[at]));
    if (Math.abs(power - Math.round(power)) < 1e-6 && x(at) > room) {
      root.append(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: bottom, y2: bottom + 4 }));
      root.append(svg("text", { x: x(at), y: bottom + 16, "text-anchor": "middle", text: shown(edges[at]) }));
      room = x(at) + 46;
    }
  }
  root.append(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }));
  root.append(svg("text", { x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end", text: "KL of a token, nats" }));
  const middle = (bottom + MARGIN.top) / 2;
  root.append(svg("text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})`, text: "share of tokens" }));
  return root;
}
