// Many curves as one: their mean, and the band from the lowest to the highest. `nbtrain/watch/across_ranks.py` does the
// same for the saved picture; both are tested with the cases of `js/test/across.json`.

import { oneOf } from "./series.js";

// `lows` and `highs`: of each curve a list over the same columns `x`, as columns() makes them. A curve that has nothing
// in a column where another one has is taken to go straight on there. `held`: of each curve, whether it goes on with its
// last value until the end: news of it is late, no more.
export function across(x, lows, highs, held = []) {
  const count = x.length;
  const own = new Uint8Array(count); // 1: a value of some curve; 2: gaps only
  for (const low of lows) {
    for (let i = 0; i < count; i++) {
      if (low[i] === undefined) continue;
      if (low[i] !== null) own[i] = 1;
      else if (!own[i]) own[i] = 2;
    }
  }
  const sum = new Float64Array(count);
  const many = new Uint16Array(count);
  const lowest = new Float64Array(count).fill(Infinity);
  const highest = new Float64Array(count).fill(-Infinity);
  const add = (i, low, high) => {
    sum[i] += low + (high - low) / 2;
    many[i] += 1;
    if (low < lowest[i]) lowest[i] = low;
    if (high > highest[i]) highest[i] = high;
  };
  lows.forEach((low, which) => {
    const high = highs[which];
    let before = -1; // the last column with a value
    for (let i = 0; i < count; i++) {
      if (low[i] === undefined) continue;
      if (low[i] === null) {
        before = -1;
        continue;
      }
      for (let between = before + 1; before >= 0 && between < i; between++) {
        if (!own[between]) continue;
        const part = (x[between] - x[before]) / (x[i] - x[before]);
        const straight = (values) => values[before] + part * (values[i] - values[before]);
        add(between, straight(low), straight(high));
      }
      add(i, low[i], high[i]);
      before = i;
    }
    if (!held[which] || before < 0) return;
    for (let i = before + 1; i < count; i++) if (own[i]) add(i, low[before], high[before]);
  });
  const seen = (value) => (i) => (many[i] ? value(i) : own[i] ? null : undefined);
  const list = (value) => Array.from({ length: count }, (_, i) => seen(value)(i));
  return { mean: list((i) => sum[i] / many[i]), low: list((i) => lowest[i]), high: list((i) => highest[i]) };
}

const LATE = 32; // points

// Whose last value still holds: ranks tell what they log one after another.
export function late(curves) {
  const most = Math.max(0, ...curves.map((one) => one.count));
  return curves.map((one) => most - one.count <= LATE);
}

// The last x that all have. Null: they end together, or never meet.
function lastTogether(curves) {
  const ends = new Set(curves.map(({ count, x }) => `${count} ${x[x.length - 1]}`));
  if (ends.size < 2) return null;
  // Of joined neighbours only those that no value is added to are the same on all ranks.
  const tails = curves.map(({ x, width }) => (width > 1 ? x.slice(-LATE - 2, -1) : x.slice(-LATE - 1)));
  const common = tails[0].filter((x) => tails.every((tail) => tail.includes(x)));
  return common.length ? Math.max(...common) : null;
}

function valueAt({ x, low, high, bad }, where) {
  const at = x.lastIndexOf(where);
  return low[at] === null ? oneOf(bad[at]) : low[at] / 2 + high[at] / 2;
}

// The ranks in a few numbers, at the last step that all have, as they tell one after another. What is far behind has its
// own last value. `broken`: the ranks whose value is not finite.
export function latest(curves) {
  const known = [...curves].filter(([, one]) => one.count);
  const level = late(known.map(([, one]) => one));
  const step = lastTogether(known.filter((_, i) => level[i]).map(([, one]) => one));
  const lasts = known.map(([rank, one], i) => [rank, step === null || !level[i] ? one.last : valueAt(one, step)]);
  const finite = lasts.map(([, last]) => last).filter(Number.isFinite);
  const broken = lasts.filter(([, last]) => !Number.isFinite(last));
  const sum = finite.reduce((all, one) => all + one, 0);
  return {
    ranks: known.length,
    mean: finite.length ? sum / finite.length : null,
    low: Math.min(...finite),
    high: Math.max(...finite),
    broken,
  };
}
