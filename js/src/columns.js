// What of some curves can be seen: for every column of pixels the lowest and the highest value that falls into it.
// However long a curve is, no more than a chart's width of it is drawn, and no spike is lost.

// `list` of Series; `from` to `to` is shown on `width` columns. The curves share the x of the answer, where undefined
// means that a curve has nothing there (its line goes on) and null that it has a gap. `bad`: for each curve null, or
// which values that are not finite came in each column.
export function columns(list, from, to, width) {
  const count = width + 2; // one more on each side, so that lines run out of the picture
  const scale = to > from ? width / (to - from) : 0;
  const at = new Float64Array(count).fill(NaN);
  const lows = [];
  const highs = [];
  const bads = [];
  for (const { x, low, high, bad, spoilt } of list) {
    const lowest = new Array(count).fill(undefined);
    const highest = new Array(count).fill(undefined);
    const spoils = spoilt ? new Uint8Array(count) : null;
    const end = Math.min(x.length, first(x, to, true) + 1);
    for (let i = Math.max(0, first(x, from, false) - 1); i < end; i++) {
      const column = x[i] < from ? 0 : x[i] > to ? count - 1 : Math.min(width, 1 + Math.floor((x[i] - from) * scale));
      if (Number.isNaN(at[column])) at[column] = x[i];
      if (spoils) spoils[column] |= bad[i];
      if (lowest[column] == null) {
        lowest[column] = low[i];
        highest[column] = high[i];
      } else if (low[i] !== null) {
        if (low[i] < lowest[column]) lowest[column] = low[i];
        if (high[i] > highest[column]) highest[column] = high[i];
      }
    }
    lows.push(lowest);
    highs.push(highest);
    bads.push(spoils);
  }
  const used = [];
  for (let column = 0; column < count; column++) if (!Number.isNaN(at[column])) used.push(column);
  const kept = (values) => values && used.map((column) => values[column]);
  return { x: kept(at), low: lows.map(kept), high: highs.map(kept), bad: bads.map(kept) };
}

// The index of the first value of a sorted list that is at least `bound`, or `beyond` it.
export function first(sorted, bound, beyond) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < bound || (beyond && sorted[middle] === bound)) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The middle of each column, which is what a line goes through.
export const middles = (low, high) => low.map((value, at) => (value == null ? value : value + (high[at] - value) / 2));

// A curve that says nothing just here says it nearby.
export function nearest(list, at) {
  for (let away = 0; away < 60; away++) {
    if (typeof list[at - away] === "number") return at - away;
    if (typeof list[at + away] === "number") return at + away;
  }
  return null;
}
