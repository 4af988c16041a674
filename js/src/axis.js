// What charts over the same x share: the part that is looked at, and the cursor.

import { duration, whole } from "./format.js";

let made = 0;

export class Axis {
  // `word(x)` names a place, `tick(x)` labels one, `steps` are the distances that ticks may have.
  constructor({ word, tick, steps }) {
    Object.assign(this, { word, tick, steps });
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

export const steps = () => new Axis({ word: (x) => `step ${whole(x)}`, tick: whole, steps: decades });

export const seconds = () =>
  new Axis({
    word: duration,
    tick: duration,
    steps: [...clock, ...decades.map((days) => 86400 * days)],
  });
