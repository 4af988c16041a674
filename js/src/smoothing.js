// An exponential moving average as TensorBoard and W&B draw it: what came before weighs `weight`, and the first values
// are not pulled to zero.

const POINTS = 1000; // Of a longer curve the average is that of a thousand points: what is seen does not depend on length.

// A curve as columns() reads one, each bucket's value the average until there.
export function smoothed({ x, low, high, bad, spoilt }, weight) {
  const range = x.length ? x[x.length - 1] - x[0] : 0;
  const values = new Array(x.length);
  let [sum, mass, gone, factor] = [0, 0, -1, weight];
  for (let i = 0; i < x.length; i++) {
    if (low[i] === null) {
      values[i] = null;
      continue;
    }
    const step = i && range ? Math.min(1, ((x[i] - x[i - 1]) / range) * POINTS) : 1;
    if (step !== gone) [gone, factor] = [step, weight ** step]; // the same for most
    sum = sum * factor + (1 - factor) * (low[i] + (high[i] - low[i]) / 2);
    mass = mass * factor + (1 - factor);
    values[i] = sum / mass;
  }
  return { x, low: values, high: values, bad, spoilt };
}
