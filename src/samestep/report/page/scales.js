// Scales: from values to pixels, and the ticks and words for them.

const STEP_SIZES = [1, 2, 5];
const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function roundSize(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([...STEP_SIZES, 10].find((size) => size * power >= rough * 0.999) || 10);
}

function spread(low, high, size) {
  const ticks = [];
  for (let i = Math.ceil(low / size - 1e-9); i <= Math.floor(high / size + 1e-9); i++) ticks.push(i * size + 0); // no minus before a zero
  return ticks;
}

function linearTicks(low, high, count, whole) {
  let size = roundSize((high - low) / Math.max(1, count));
  if (whole) size = Math.max(1, size);
  return spread(low, high, size);
}

function byteTicks(low, high, count) {
  const unit = (BYTES.find((each) => high >= each[1]) || ["B", 1])[1];
  return linearTicks(low / unit, high / unit, count, false).map((tick) => tick * unit);
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const stride = Math.max(1, Math.ceil((last - first) / count));
  const within = last - first <= 2 ? [1, 2, 5] : last - first <= 3 ? [1, 3] : [1];
  const ticks = [];
  for (let power = first; power <= last; power += stride) {
    for (const digit of stride > 1 ? [1] : within) ticks.push(Number(`${digit}e${power}`));
  }
  const shown = ticks.filter((tick) => tick >= low * 0.9999 && tick <= high * 1.0001);
  return shown.length >= 2 ? shown : linearTicks(low, high, count, false).filter((tick) => tick > 0);
}

function makeScale(low, high, from, to, isLog) {
  const map = isLog ? Math.log : (value) => value;
  const start = map(low), length = map(high) - start || 1;
  const scale = (value) => from + ((map(value) - start) / length) * (to - from);
  scale.low = low;
  scale.high = high;
  scale.back = (pixel) => {
    const at = start + ((pixel - from) / (to - from)) * length;
    return isLog ? Math.exp(at) : at;
  };
  return scale;
}

function grouped(value) {
  return Math.round(value).toLocaleString("en-US");
}

function plain(value, digits) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: size >= 10000 ? 0 : 1 });
  return String(Number(value.toPrecision(digits)));
}

function inUnit(value, unit, digits) {
  if (unit === "share") return `${Number((100 * value).toPrecision(digits))} %`;
  if (unit === "rate") return `${plain(value, digits)}/s`;
  if (unit === "seconds") {
    if (value === 0) return "0";
    if (value >= 1) return `${Number(value.toPrecision(digits))} s`;
    return value >= 1e-3 ? `${Number((1e3 * value).toPrecision(digits))} ms` : `${Number((1e6 * value).toPrecision(digits))} µs`;
  }
  if (unit === "bytes") {
    const [name, size] = BYTES.find((each) => value >= each[1]) || ["B", 1];
    return `${Number((value / size).toPrecision(digits))} ${name}`;
  }
  return plain(value, digits);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}
