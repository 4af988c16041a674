// What the chart of a step draws: the phases on top of each other, in milliseconds, as a mean over the ranks.

import { columns } from "./columns.js";
import { milliseconds } from "./format.js";
import { NAMES, PHASES } from "./phases.js";
import { faint } from "./theme.js";

export class Layers {
  constructor(theme) {
    this.theme = theme;
    this.shape = "layers";
    this._curves = [];
  }

  // `phases`: name -> rank -> Series. True when there is something new to draw.
  take(phases) {
    this._curves = PHASES.map((name) => [...(phases.get(name)?.values() ?? [])]);
    const state = this._curves.map((ranks) => ranks.map((one) => one.count).join()).join(";");
    const fresh = state !== this._state;
    this._state = state;
    return fresh;
  }

  extent() {
    const known = this._curves.flat().filter((one) => one.length);
    return [Math.min(...known.map((one) => one.x[0])), Math.max(...known.map((one) => one.x[one.length - 1]))];
  }

  data(from, to, width) {
    // Fewer columns than pixels: a layer is as high as what its neighbours say together, not as their extremes.
    const { x, low, high } = columns(this._curves.flat(), from, to, Math.ceil(width / 2));
    let next = 0;
    const below = new Array(x.length).fill(0);
    const layers = this._curves.map((ranks) => {
      const mine = ranks.map(() => next++);
      const values = mean(
        mine.map((i) => filled(low[i], high[i])),
        x.length,
      );
      return values.map((value, at) => (below[at] += value));
    });
    this._top = layers[layers.length - 1];
    return { data: [x, ...layers] };
  }

  range(_, high) {
    return [0, high ? 1.06 * high : 1];
  }

  tick(y) {
    return milliseconds(y);
  }

  series() {
    return PHASES.map((name, i) => ({
      stroke: () => this.theme.phase(name),
      width: 1,
      points: { show: false },
      fill: i ? undefined : this._fill(name),
    }));
  }

  bands() {
    return PHASES.slice(1).map((name, i) => ({ series: [i + 2, i + 1], fill: this._fill(name) }));
  }

  _fill(name) {
    return () => faint(this.theme.phase(name), 0.45);
  }

  // What is not to be covered.
  main() {
    return this._top ?? [];
  }

  legend(at, shown) {
    return at === null ? [] : [{ name: "", value: milliseconds(shown.data[PHASES.length][at] ?? 0) }];
  }

  rows(at, shown) {
    return PHASES.map((name, i) => ({
      colour: this.theme.phase(name),
      name: NAMES[name],
      value: milliseconds(Math.max(0, shown.data[i + 1][at] - (i ? shown.data[i][at] : 0))),
    })).reverse();
  }
}

// The middle of each column; where there is nothing, what was there before.
function filled(low, high) {
  const found = [];
  let last = 0;
  for (let i = 0; i < low.length; i++) {
    if (low[i] !== undefined && low[i] !== null) last = (low[i] + high[i]) / 2;
    found.push(last);
  }
  return found;
}

function mean(lists, length) {
  const found = new Array(length).fill(0);
  for (const list of lists) for (let i = 0; i < length; i++) found[i] += list[i] / lists.length;
  return found;
}
