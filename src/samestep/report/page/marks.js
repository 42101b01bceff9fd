// Marks: the events of a run over its curves, with labels that stay clear of each other.

const ROW = 16, MOST_ROWS = 3, GAP = 10, LETTER = 6.1;
const PLURALS = {
  death: "deaths", heal: "heals", join: "joins", resume: "resumes", stop: "stops", contract_change: "contract changes",
};
const SINGULARS = { contract_change: "contract change" };

function bundled(events, place) {
  // Events at (almost) one pixel share a mark.
  const marks = [];
  const sorted = events.map((event) => ({ event, x: place(event) })).sort((a, b) => a.x - b.x);
  for (const { event, x } of sorted) {
    const last = marks[marks.length - 1];
    if (last && x - last.to < 3) {
      last.events.push(event);
      last.to = x;
    } else marks.push({ x, to: x, events: [event] });
  }
  return marks;
}

function counts(events) {
  const number = new Map();
  for (const event of events) number.set(event.name, (number.get(event.name) || 0) + 1);
  return [...number].map(([name, count]) =>
    `${count} ${count > 1 ? PLURALS[name] || name : SINGULARS[name] || name}`).join(", ");
}

function wording(events, room) {
  const whole = [...new Set(events.map((event) => event.label))].join(" · ");
  const choices = events.length <= 2 ? [whole] : [];
  choices.push(events.length > 1 ? counts(events) : events[0].label, `${events.length} event${events.length > 1 ? "s" : ""}`);
  return choices.find((text) => text.length * LETTER <= room) || choices[choices.length - 1];
}

function layLabels(marks, left, right) {
  // Each label stands right of its line, or left of it at the right border. A line must not cross a label.
  const room = Math.max(80, (right - left) * 0.6);
  let groups = marks.map((mark) => ({ ...mark }));
  while (groups.length) {
    const placed = [];
    let crowded = -1;
    for (const [number, group] of groups.entries()) {
      const text = wording(group.events, room);
      const length = text.length * LETTER + 4;
      const isEnd = group.x + 4 + length > right;
      const label = { ...group, text, isEnd, from: isEnd ? Math.max(left, group.x - 4 - length) : group.x + 4 };
      label.until = label.from + length;
      label.row = [...Array(MOST_ROWS).keys()].find((row) => placed.every((other) => !collide(label, row, other)));
      if (label.row === undefined) {
        crowded = number;
        break;
      }
      placed.push(label);
    }
    if (crowded < 0) return placed;
    const before = groups[crowded - 1], now = groups[crowded];
    groups.splice(crowded - 1, 2, { x: before.x, to: now.to, events: [...before.events, ...now.events] });
  }
  return [];
}

function collide(label, row, other) {
  if (other.row === row) return label.from < other.until + GAP && other.from < label.until + GAP;
  const [upper, lower] = row < other.row ? [label, other] : [other, label];
  return upper.x > lower.from - 4 && upper.x < lower.until + 4;
}
