// The page: its cards, its switches, and what the pointer and the arrow keys show.

const data = JSON.parse(document.getElementById("data").textContent);
const spoken = document.getElementById("spoken");
const NEAR = 9;

const view = {
  hidden: new Set(), printing: false, narrow: false, runs: data.runs, events: [], range: [0, 1],
};
const cards = data.charts.map(makeCard);

function make(parent, name, properties, ...children) {
  const element = document.createElement(name);
  Object.assign(element, properties);
  element.append(...children);
  if (parent) parent.append(element);
  return element;
}

function sample(run) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("width", 26);
  svg.setAttribute("height", 10);
  svg.setAttribute("aria-hidden", "true");
  const line = add(svg, "line", { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": data.runs[run].dash });
  line.style.stroke = runColor(run);
  return svg;
}

function makeCard(chart) {
  const element = make(document.getElementById("charts"), "figure", { className: `card${chart.whole ? " whole" : ""}` });
  const head = make(element, "figcaption", { className: "head" });
  make(head, "div", {}, make(null, "h3", {}, chart.title), make(null, "span", { className: "note" }, chart.note));
  const card = { chart, element, isLog: chart.log, drawn: null, snap: null };
  card.runs = chart.stack ? [chart.stack.run] : [...new Set(chart.series.map((series) => series.run))];
  card.visible = (seen) => chart.series.filter((series) => !seen.hidden.has(series.run));
  if (chart.may_log) {
    const button = make(head, "button", { type: "button", ariaPressed: card.isLog, ariaLabel: `Logarithmic axis for ${chart.title}` }, "log");
    button.onclick = () => {
      card.isLog = !card.isLog;
      button.ariaPressed = card.isLog;
      drawCard(card, view);
    };
  }
  if (chart.stack) {
    const key = make(element, "div", { className: "key" });
    chart.stack.names.forEach((name, part) => {
      const swatch = make(null, "i", { className: "swatch" });
      swatch.style.background = `var(--part-${part % 6})`;
      make(key, "span", {}, swatch, name);
    });
  }
  card.plot = make(element, "div", { className: "plot", tabIndex: 0 });
  card.plot.setAttribute("role", "img");
  card.plot.setAttribute("aria-label", `${chart.title}. ${chart.summary} The arrow keys read the values.`);
  card.tip = make(element, "div", { className: "tip", hidden: true });
  card.plot.onpointermove = (event) => point(card, event.clientX - card.plot.getBoundingClientRect().left);
  card.plot.onpointerdown = card.plot.onpointermove;
  card.plot.onpointerleave = () => release();
  card.plot.onblur = () => release();
  card.plot.onkeydown = (event) => walk(card, event);
  return card;
}

function places(card) {
  // The steps at which there is something to read, ascending.
  const { chart } = card;
  const found = chart.stack
    ? chart.stack.x
    : card.visible(view).flatMap((series) => series.x);
  return [...new Set(found)].sort((a, b) => a - b);
}

function point(card, pixel) {
  if (!card.drawn) return;
  const all = places(card);
  if (!all.length) return;
  const scale = card.plot.clientWidth / card.drawn.width || 1;
  show(card, all[nearest(all, card.drawn.x.back(pixel / scale))]);
}

function walk(card, event) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
  if (event.key === "Escape") release();
  if (!(event.key in moves) || !card.drawn) return;
  event.preventDefault();
  const all = places(card);
  if (!all.length) return;
  const now = card.snap === null ? (moves[event.key] > 0 ? -1 : all.length) : nearest(all, card.snap);
  show(card, all[Math.max(0, Math.min(all.length - 1, now + moves[event.key]))]);
  spoken.textContent = card.tip.innerText.replace(/\s+/g, " ");
}

function readings(card, at) {
  // The values near a place: [run or part, words, value, pixel y].
  const { chart, drawn } = card;
  if (chart.stack) {
    const i = nearest(chart.stack.x, at);
    const row = chart.stack.rows[i];
    const parts = chart.stack.names.map((name, part) => ({ color: `var(--part-${part % 6})`, words: name, value: inUnit(row[part], "seconds", 3) }));
    const sum = row.reduce((total, value) => total + value, 0);
    return [...parts.reverse(), { words: "together", value: inUnit(sum, "seconds", 3) }];
  }
  const found = [];
  for (const series of card.visible(view)) {
    if (!series.x.length) continue;
    const i = nearest(series.x, at);
    const x = drawn.x(series.x[i]);
    if (Math.abs(x - drawn.x(at)) > NEAR) continue;
    const bad = series.bad.find((each) => each[0] === series.x[i]);
    if (series.y[i] === null && !bad) continue;
    const words = [data.runs.length > 1 ? data.runs[series.run].name : "", series.label].filter(Boolean).join(", ") || chart.title;
    const value = bad ? bad[1] : inUnit(series.y[i], chart.unit, 5);
    const y = series.y[i] === null ? undefined : drawn.y(series.y[i]);
    found.push({ color: runColor(series.run), words, value, x, y });
  }
  return found;
}

function show(card, at) {
  release();
  card.snap = at;
  const { drawn, tip, chart } = card;
  for (const other of cards) {
    if (!other.drawn || at < other.drawn.x.low || at > other.drawn.x.high) continue;
    const x = other.drawn.x(at);
    other.drawn.cross.setAttribute("x1", x);
    other.drawn.cross.setAttribute("x2", x);
    other.drawn.cross.setAttribute("visibility", "visible");
  }
  const rows = readings(card, at);
  for (const { x, y, color } of rows) {
    if (!Number.isFinite(y)) continue;
    const dot = add(drawn.svg, "circle", { class: "dot", r: 4, cx: x, cy: y });
    dot.style.fill = color;
    drawn.dots.push(dot);
  }
  tip.replaceChildren();
  make(tip, "b", {}, `step ${grouped(at)}`);
  const table = make(tip, "table", {});
  for (const { color, words, value } of rows) {
    const swatch = make(null, "i", { className: "swatch" });
    swatch.style.background = color || "transparent";
    make(table, "tr", {}, make(null, "td", {}, make(null, "span", { className: "name" }, swatch, words)), make(null, "td", {}, value));
  }
  const near = view.events.filter((event) => card.runs.includes(event.run) && Math.abs(drawn.x(event.step) - drawn.x(at)) < 5);
  const most = view.narrow ? 3 : 6;
  for (const event of near.slice(0, most)) {
    make(tip, "p", {}, `${data.runs.length > 1 ? `${data.runs[event.run].name}: ` : ""}step ${grouped(event.step)}: ${event.sentence}`);
  }
  if (near.length > most) make(tip, "p", {}, `and ${near.length - most} more events`);
  tip.hidden = false;
  const scale = card.plot.clientWidth / drawn.width;
  const x = card.plot.offsetLeft + drawn.x(at) * scale, room = card.element.clientWidth;
  const isLeft = x > room / 2;
  tip.style.left = `${Math.max(4, Math.min(room - tip.offsetWidth - 4, isLeft ? x - tip.offsetWidth - 14 : x + 14))}px`;
  tip.style.top = `${card.plot.offsetTop + (chart.key === "loss" ? drawn.top : 0) + 8}px`;
}

function release() {
  for (const card of cards) {
    card.snap = null;
    card.tip.hidden = true;
    if (!card.drawn) continue;
    card.drawn.cross.setAttribute("visibility", "hidden");
    card.drawn.dots.splice(0).forEach((dot) => dot.remove());
  }
}

function runsRange(runs) {
  let low = Math.min(...runs.map((run) => data.runs[run].first));
  const high = Math.max(...runs.map((run) => data.runs[run].last));
  if (low === 1 && high > 1) low = 0;
  if (!runs.length) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function drawAll() {
  view.narrow = window.innerWidth <= 760;
  view.events = data.events.filter((event) => !view.hidden.has(event.run));
  view.range = runsRange([...data.runs.keys()].filter((run) => !view.hidden.has(run)));
  for (const card of cards) {
    card.element.hidden = card.runs.every((run) => view.hidden.has(run));
    if (!card.element.hidden) drawCard(card, view);
  }
}

function makeControls() {
  const bar = document.getElementById("controls");
  if (data.runs.length > 1) {
    const legend = make(bar, "div", { className: "legend", role: "group", ariaLabel: "Runs" });
    data.runs.forEach((run, number) => {
      const button = make(legend, "button", { type: "button", ariaPressed: true }, sample(number), run.name);
      button.onclick = () => {
        if (!view.hidden.delete(number)) view.hidden.add(number);
        button.ariaPressed = !view.hidden.has(number);
        drawAll();
      };
    });
  }
  bar.hidden = !bar.childElementCount;
}

makeControls();
drawAll();
let knownWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === knownWidth) return;
  knownWidth = window.innerWidth;
  drawAll();
});
for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(name, () => {
    view.printing = printing;
    drawAll();
  });
}
