// What a chart of one curve per rank draws: a line, and a band from the lowest to the highest value where there are
// more points than pixels. The line is the middle of the band.

import { columns } from "./columns.js";
import { DISTINCT, faint } from "./theme.js";

const NAMED = 8; // so many ranks are listed beside the cursor

export class Curves {
  // `word(y)` names a value. `zero`: the axis begins at nothing.
  constructor({ theme, word, tick = word, zero = false }) {
    Object.assign(this, { theme, word, tick, zero });
    this.ranks = [];
    this.list = [];
    this.shape = "";
  }

  // `curves`: rank -> Series. True when there is something new to draw.
  take(curves) {
    this.ranks = [...curves.keys()];
    this.list = [...curves.values()];
    this.shape = this.ranks.join();
    const state = this.list.map((one) => `${one.count}:${one.length}`).join();
    const fresh = state !== this._state;
    this._state = state;
    return fresh;
  }

  extent() {
    const known = this.list.filter((one) => one.length);
    return [Math.min(...known.map((one) => one.x[0])), Math.max(...known.map((one) => one.x[one.length - 1]))];
  }

  // Of each rank three lists: the middle, which is its line, and the ends of its band.
  data(from, to, width) {
    const { x, low, high } = columns(this.list, from, to, width);
    const middle = (i) => low[i].map((value, at) => (value == null ? value : value + (high[i][at] - value) / 2));
    return { data: [x, ...this.list.flatMap((_, i) => [middle(i), high[i], low[i]])] };
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    const bottom = this.zero ? Math.min(0, low) : low;
    const pad = 0.06 * (high - bottom) || Math.abs(high) * 0.1 || 1;
    return [this.zero && low >= 0 ? 0 : bottom - pad, high + pad];
  }

  series() {
    const dashed = this.ranks.length <= DISTINCT;
    return this.ranks.flatMap((rank) => {
      const colour = () => this.theme.rank(rank);
      const points = { show: (plot, i, from, to) => to - from < 12, size: 5, fill: colour };
      // Faint, but there: a spike in a single column of pixels would have a band too thin to be seen.
      const edge = { stroke: () => faint(this.theme.rank(rank), 0.6), width: 1, points: { show: false } };
      return [{ stroke: colour, width: 1.5, dash: dashed ? this.theme.dash(rank) : [], points }, edge, edge];
    });
  }

  bands() {
    const fill = (rank) => () => faint(this.theme.rank(rank), 0.25);
    return this.ranks.map((rank, i) => ({ series: [3 * i + 2, 3 * i + 3], fill: fill(rank) }));
  }

  last() {
    return this._words(this.list.filter((one) => one.count).map((one) => one.last));
  }

  brief(shown, at) {
    return this._words(this._at(shown, at).map(({ high }) => high));
  }

  _words(values) {
    if (!values.length) return "";
    if (values.length === 1 || values.some((value) => !Number.isFinite(value))) {
      return this.word(values.find((value) => !Number.isFinite(value)) ?? values[0]);
    }
    const [low, high] = [this.word(Math.min(...values)), this.word(Math.max(...values))];
    return low === high ? low : `${low} – ${high}`;
  }

  // Of many ranks those nearest to the cursor.
  rows(shown, at, y) {
    const found = this._at(shown, at);
    if (found.length > NAMED) {
      const far = ({ low, high }) => Math.max(low - y, y - high, 0);
      found.sort((a, b) => far(a) - far(b));
      found.length = NAMED;
      found.sort((a, b) => a.rank - b.rank);
    }
    const rows = found.map(({ rank, low, high }) => ({
      colour: this.theme.rank(rank),
      name: this.ranks.length > 1 ? `rank ${rank}` : "",
      value: low === high ? this.word(low) : `${this.word(low)} – ${this.word(high)}`,
    }));
    if (this.ranks.length > NAMED) rows.push({ name: `${this.ranks.length - rows.length} more ranks`, value: "" });
    return rows;
  }

  // A rank that said nothing just here said it nearby.
  _at({ data }, at) {
    const found = [];
    this.ranks.forEach((rank, i) => {
      const [high, low] = [data[3 * i + 2], data[3 * i + 3]];
      let near = at;
      for (let away = 1; high[near] === undefined && away < 40; away++) {
        if (high[at - away] !== undefined) near = at - away;
        else if (high[at + away] !== undefined) near = at + away;
      }
      if (high[near] !== undefined && high[near] !== null) found.push({ rank, high: high[near], low: low[near] });
    });
    return found;
  }
}
