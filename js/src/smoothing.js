// An exponential moving average as TensorBoard and W&B draw it: what came before weighs `weight`, and the first values
// are not pulled to zero.

const POINTS = 1000; // Of a longer curve the average is that of a thousand points: what is seen does not depend on length.

// A curve as columns() reads one, each value the average until there. It has at most twice as many points: more could
// not be told apart.
export function smoothed({ x, low, high }, weight) {
  const range = x.length ? x[x.length - 1] - x[0] : 0;
  const joined = Math.ceil(x.length / (2 * POINTS)) || 1;
  const [xs, values] = [[], []];
  let [sum, mass, gone, factor] = [0, 0, -1, weight];
  for (let i = 0; i < x.length; i += joined) {
    const y = middle(low, high, i, Math.min(i + joined, x.length));
    xs.push(x[i]);
    values.push(null);
    if (y === null) continue;
    const step = i && range ? Math.min(1, ((x[i] - x[i - joined]) / range) * POINTS) : 1;
    if (step !== gone) [gone, factor] = [step, weight ** step]; // the same for most
    sum = sum * factor + (1 - factor) * y;
    mass = mass * factor + (1 - factor);
    values[values.length - 1] = sum / mass;
  }
  return { x: xs, low: values, high: values };
}

// Of the neighbours from `begin` to `end`; null: they are a gap.
function middle(low, high, begin, end) {
  let [sum, count] = [0, 0];
  for (let i = begin; i < end; i++) {
    if (low[i] === null) continue;
    sum += low[i] + (high[i] - low[i]) / 2;
    count += 1;
  }
  return count ? sum / count : null;
}
