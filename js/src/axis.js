// What charts over the same x share: the part that is looked at, and the cursor.

import { duration, whole } from "./format.js";

let made = 0;

export class Axis {
  // `name`: what x is. `word(x)` names a place, `tick(x)` labels one, `steps` are the distances that ticks may have.
  constructor({ name, word, tick, steps }) {
    Object.assign(this, { name, word, tick, steps });
    this.key = `nbtrain-${made++}`;
    this.part = null; // [from, to]; null: all of it
    this._listeners = new Set();
  }

  zoom(from, to) {
    this.part = from === null ? null : [from, to];
    for (const listener of [...this._listeners]) listener();
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }
}

const decades = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const clock = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];

export const steps = () => new Axis({ name: "step", word: (x) => `step ${whole(x)}`, tick: whole, steps: decades });

export const seconds = () =>
  new Axis({
    name: "seconds",
    word: duration,
    tick: duration,
    steps: [...clock, ...decades.map((days) => 86400 * days)],
  });

// ---------------------------------------------------------------- parts of an axis: [from, to]

const CLOSEST = 1e-4; // of all there is, the smallest part that keys and fingers zoom to

// `times` as much as now, with `at` where it is; null: all of `extent`.
export function scaled([from, to], times, at, extent) {
  return inside([at - (at - from) * times, at + (to - at) * times], extent);
}

// Moved by a share of itself, not beyond the ends.
export function shifted([from, to], share, extent) {
  const way = share * (to - from);
  return inside([from + way, to + way], extent);
}

// What fingers show that were at `before` and are at `after`, in pixels of `width`: what was under them stays there.
export function dragged([from, to], before, after, width, extent) {
  const value = (pixel) => from + ((to - from) * pixel) / width;
  const apart = after.length > 1 ? after[1] - after[0] : 0;
  const perPixel = Math.abs(apart) > 8 ? (value(before[1]) - value(before[0])) / apart : (to - from) / width;
  if (!(perPixel > 0)) return [from, to]; // the fingers have crossed
  const begin = value(before[0]) - perPixel * after[0];
  return inside([begin, begin + perPixel * width], extent);
}

// As long as it is, or as all there is, and moved to where there is something.
function inside([from, to], [first, last]) {
  const length = Math.max(to - from, CLOSEST * (last - first));
  if (length >= last - first) return null;
  const begin = Math.min(Math.max((from + to - length) / 2, first), last - length);
  return [begin, begin + length];
}
