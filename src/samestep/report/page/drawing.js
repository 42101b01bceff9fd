// Drawing: one chart as SVG.

const SVG = "http://www.w3.org/2000/svg";
const SHORT = 40;

function add(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function runColor(run) {
  return `var(--run-${run % 6})`;
}

function valueRange(card, view) {
  let low = Infinity, high = -Infinity;
  if (card.chart.stack) {
    for (const row of card.chart.stack.rows) high = Math.max(high, row.reduce((sum, value) => sum + value, 0));
    return [0, high > 0 ? high * 1.05 : 1];
  }
  for (const series of card.visible(view)) {
    for (const value of series.y) {
      if (value === null || (card.isLog && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return [card.isLog ? 0.1 : 0, 1];
  if (card.isLog) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
  if (low === high && card.chart.unit === "share") return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.5, high + Math.abs(high) * 0.5];
  const room = 0.05 * (high - low);
  const bottom = low >= 0 && low - room < 0.15 * high ? 0 : low - room;
  return [bottom, card.chart.unit === "share" && high <= 1 ? Math.min(1, high + room) : high + room];
}

function drawCard(card, view) {
  const { chart, plot } = card;
  const width = view.printing ? (chart.whole ? 690 : 325) : plot.clientWidth;
  if (width < 40) return;
  const inner = chart.whole ? (width < 600 ? 250 : 320) : width < 600 && view.narrow ? 190 : 210;
  const [low, high] = valueRange(card, view);
  const count = inner > 240 ? 6 : 4;
  const even = chart.unit === "bytes" ? byteTicks : linearTicks;
  const ticks = card.isLog ? logTicks(low, high, count) : even(low, high, count, chart.whole_numbers);
  const words = ticks.map((tick) => inUnit(tick, chart.unit, 4));
  const left = Math.max(30, 10 + Math.max(0, ...words.map((word) => word.length)) * 6.4), right = width - 12;
  const x = makeScale(...(chart.stack ? runsRange([chart.stack.run]) : view.range), left, right, false);
  const events = view.events.filter((event) => card.runs.includes(event.run));
  const marks = bundled(events.filter((event) => !event.quiet), (event) => x(event.step));
  const labels = chart.key === "loss" ? layLabels(marks, left, right) : [];
  const top = 10 + ROW * Math.max(0, ...labels.map((label) => label.row + 1)), bottom = top + inner;
  const y = makeScale(low, high, bottom, top, card.isLog);
  plot.replaceChildren();
  const svg = add(plot, "svg", { viewBox: `0 0 ${width} ${bottom + 26}`, "aria-hidden": "true" });
  drawAxes(svg, { ticks, words, x, y, left, right, top, bottom });
  if (chart.stack) drawStack(svg, chart.stack, x, y);
  drawMarks(svg, marks, labels, { events, top, bottom, view, x });
  const order = { faint: 0, line: 1, steps: 1, dots: 2 };
  const visible = [...card.visible(view)].sort((a, b) => order[a.style] - order[b.style]);
  for (const series of visible) drawSeries(svg, series, x, y, view, top);
  const cross = add(svg, "line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  card.drawn = { svg, x, y, left, right, top, bottom, width, cross, dots: [] };
}

function drawAxes(svg, { ticks, words, x, y, left, right, top, bottom }) {
  ticks.forEach((tick, i) => {
    add(svg, "line", { class: "tick", x1: left, x2: right, y1: y(tick), y2: y(tick) });
    add(svg, "text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, words[i]);
  });
  const along = linearTicks(x.low, x.high, Math.max(2, Math.floor((right - left) / 84)), true);
  add(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
  for (const tick of along) {
    add(svg, "line", { class: "axis", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 });
    const word = grouped(tick);
    const isLast = x(tick) + word.length * 3.2 > right + 10;
    add(svg, "text", { x: isLast ? right + 10 : x(tick), y: bottom + 18, "text-anchor": isLast ? "end" : "middle" }, word);
  }
}

function drawMarks(svg, marks, labels, { events, top, bottom, view, x }) {
  const many = view.runs.length > 1;
  for (const event of events.filter((each) => each.name === "checkpoint")) {
    add(svg, "path", { class: "saved", d: `M${x(event.step).toFixed(1)} ${bottom - 6}l3.5 6h-7z` });
  }
  for (const mark of marks) {
    const line = add(svg, "line", { class: `event ${kind(mark.events)}`, x1: mark.x, x2: mark.x, y1: top, y2: bottom });
    if (many) line.style.stroke = markColor(mark.events);
  }
  for (const label of labels) {
    const at = 10 + ROW * label.row;
    const line = add(svg, "line", { class: `event ${kind(label.events)}`, x1: label.x, x2: label.x, y1: at - 7, y2: top });
    const place = { class: `mark ${kind(label.events)}`, y: at + 3, x: label.isEnd ? label.x - 4 : label.x + 4 };
    const text = add(svg, "text", { ...place, "text-anchor": label.isEnd ? "end" : "start" }, label.text);
    if (many) line.style.stroke = text.style.fill = markColor(label.events);
  }
}

function markColor(events) {
  const { run } = events[0];
  return events.every((event) => event.run === run) ? runColor(run) : "var(--ink)";
}

function kind(events) {
  return ["death", "resume", "heal", "join"].find((name) => events.some((event) => event.name === name)) || "";
}

function drawSeries(svg, series, x, y, view, top) {
  const path = [], alone = [];
  let before = null;
  series.x.forEach((step, i) => {
    const value = series.y[i];
    if (value === null || (value <= 0 && !Number.isFinite(y(value)))) {
      before = null;
      return;
    }
    const at = `${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    if (before !== null && series.style === "steps") path.push(`L${at.split(" ")[0]} ${y(before).toFixed(1)}`);
    path.push(`${before === null ? "M" : "L"}${at}`);
    if (before === null && (i + 1 >= series.x.length || series.y[i + 1] === null)) alone.push(i);
    before = value;
  });
  const curve = add(svg, "path", { class: `curve ${series.style}`, d: path.join("") });
  curve.style.stroke = runColor(series.run);
  const dash = view.runs[series.run].dash;
  if (dash && series.style !== "faint") curve.setAttribute("stroke-dasharray", dash);
  if (series.style === "dots") curve.style.strokeWidth = 1.2;
  const isShort = (series.style === "line" || series.style === "dots") && series.x.length <= (series.style === "dots" ? 150 : SHORT);
  const dots = isShort ? series.x.keys() : alone;
  for (const i of dots) {
    if (series.y[i] === null) continue;
    const center = { cx: x(series.x[i]), cy: y(series.y[i]) };
    add(svg, "circle", { ...center, class: "dot", r: series.style === "dots" ? (series.x.length > 50 ? 2.5 : 4) : 3 }).style.fill = runColor(series.run);
  }
  let last = -Infinity;
  for (const [step] of series.style === "line" && series.label.includes("smoothed") ? [] : series.bad) {
    const at = x(step);
    if (at - last < 6) continue;
    last = at;
    add(svg, "path", { class: "bad", d: `M${at - 3.5} ${top - 0.5}l7 7m0 -7l-7 7` });
  }
}

function drawStack(svg, stack, x, y) {
  const xs = stack.x.map(x);
  const rows = stack.rows;
  const start = Math.min(xs[0], x(0));
  const across = [Math.max(start, x(x.low)), ...xs], along = [rows[0], ...rows];
  let floor = along.map(() => 0);
  stack.names.forEach((name, part) => {
    const ceiling = floor.map((value, i) => value + along[i][part]);
    const up = across.map((at, i) => `${at.toFixed(1)} ${y(ceiling[i]).toFixed(1)}`);
    const down = across.map((at, i) => `${at.toFixed(1)} ${y(floor[i]).toFixed(1)}`).reverse();
    const area = add(svg, "path", { d: `M${[...up, ...down].join("L")}Z`, "stroke-width": 0.7 });
    area.style.fill = `var(--part-${part % 6})`;
    area.style.stroke = "var(--card)";
    floor = ceiling;
  });
}
