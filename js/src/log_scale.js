// A logarithmic scale, which has no place for zero and below: what lies there is left out, and counted.

// The values that a log scale shows; null, a gap, for the others.
export function positive(values) {
  return values.map((value) => (value === undefined || value > 0 ? value : null));
}

// The low edge of a band whose high edge is shown: below all that is shown where it is not above zero itself.
export function floored(low, high, floor) {
  return low.map((value, i) => (value == null ? value : high[i] > 0 ? Math.max(value, floor) : null));
}

// The smallest value above zero of some lists; null: there is none.
export function least(lists) {
  let found = Infinity;
  for (const list of lists) for (const value of list) if (value > 0 && value < found) found = value;
  return found < Infinity ? found : null;
}

// Where the labels of a log scale stand: at powers of ten, with 2 and 5 between few of them; of less than a decade, at
// round numbers.
export function logTicks(low, high, most = 6) {
  if (high / low < 10) return roundTicks(low, high, most);
  const [begin, end] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const powers = Array.from({ length: end - begin + 1 }, (_, i) => begin + i);
  const inside = (digits, every) =>
    powers
      .filter((power) => (power - begin) % every === 0)
      .flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`)))
      .filter((value) => value >= low && value <= high);
  for (const digits of [
    [1, 2, 5],
    [1, 3],
  ])
    if (inside(digits, 1).length <= most) return inside(digits, 1);
  let every = 1;
  while (inside([1], every).length > most) every += 1;
  return inside([1], every);
}

function roundTicks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
