// What a chart of curves draws: of each part (train, validation) the mean over the ranks, in a band from the lowest to
// the highest; the lines of chosen ranks; the mean of an earlier run, dashed.

import { across, late } from "./across.js";
import { columns, middles, nearest } from "./columns.js";
import { PAST_DASH, partColour, rankColour, rankDash } from "./curve_settings.js";
import { nowWords, range, thereWords } from "./curve_words.js";
import { floored, least, logTicks, positive } from "./log_scale.js";
import { smoothed } from "./smoothing.js";
import { faint } from "./theme.js";

const NAMED = 8; // so many chosen ranks are listed beside the cursor
const FEW = 12; // so many points are drawn as points, too

export class Curves {
  // `word(y)` names a value. `zero`: the axis begins at nothing. `settings`: see curve_settings.js.
  constructor({ theme, settings, word, tick = word, zero = false }) {
    Object.assign(this, { theme, settings, word, tick, zero });
    this.parts = [];
    this.shape = "";
    this.hidden = false; // whether the log scale leaves something out
  }

  // `parts`: [{ name, label, curves: rank -> Series }]. True when there is something new to draw.
  take(parts) {
    this.parts = parts;
    const of = ({ name, label, curves }) => [
      name,
      label,
      ...[...curves.values()].map((one) => `${one.count}:${one.length}`),
    ];
    const state = parts.map((part) => of(part).join()).join(";");
    const fresh = state !== this._state;
    this._state = state;
    return fresh;
  }

  get log() {
    return this.settings.log && !this.zero;
  }

  extent() {
    const known = this._all().filter((one) => one.length);
    return [Math.min(...known.map((one) => one.x[0])), Math.max(...known.map((one) => one.x[one.length - 1]))];
  }

  // Of each line of lines() a list over the shared x.
  data(from, to, width) {
    const { smoothing } = this.settings;
    const seen = (lists) => columns(lists, from, to, width);
    const raw = seen(this._all());
    const soft = smoothing ? seen(this._all().map((one) => smoothed(one, smoothing))) : null;
    this._shownLines = this._lines();
    this.shape = this._shownLines.map(({ key }) => key).join() + (this.log ? " log" : "");
    let next = 0;
    this._rows = this.parts.map((part) => {
      const members = [...part.curves.keys()].map(() => next++);
      const past = this._past(part) ? next++ : null;
      return this._part(part, members, past, raw, soft);
    });
    const found = this._shownLines.map(({ key, part }) => this._rows[part].drawn.get(key));
    return { data: [raw.x, ...(this.log ? this._logarithmic(found) : found)], bad: this._bad(raw.x.length) };
  }

  _part(part, members, past, raw, soft) {
    const of = (lists) => members.map((i) => lists[i]);
    const ranks = [...part.curves.keys()];
    const held = late([...part.curves.values()]);
    const all = across(raw.x, of(raw.low), of(raw.high), held);
    const drawn = new Map();
    const put = (key, list) => drawn.set(`${part.name} ${key}`, list);
    put("high", all.high);
    put("low", all.low);
    const line = (key, plain, soft) => {
      put(key, soft ?? plain);
      if (soft) put(`${key} raw`, plain);
    };
    line("mean", all.mean, soft && across(soft.x, of(soft.low), of(soft.high), held).mean);
    const single = (i) => [middles(raw.low[i], raw.high[i]), soft && middles(soft.low[i], soft.high[i])];
    ranks.forEach((rank, i) => this._chosen(part, rank) && line(`rank ${rank}`, ...single(members[i])));
    if (past !== null) line("past", ...single(past));
    const bads = of(raw.bad).filter(Boolean);
    return {
      ...all,
      drawn,
      spoilt: bads.length > 0,
      bits: (column) => bads.reduce((all, one) => all | one[column], 0),
      ranks,
      lows: of(raw.low),
      highs: of(raw.high),
      past: past === null ? null : single(past)[0],
    };
  }

  _logarithmic(found) {
    const floor = least(found) ?? 1;
    this.hidden = this._rows.some(({ low }) => low.some((value) => value !== null && value <= 0));
    return found.map((list, i) => {
      const { key, part } = this._shownLines[i];
      return key.endsWith(" low") ? floored(list, this._rows[part].high, floor) : positive(list);
    });
  }

  // The columns where something came that is not finite: [column, bits].
  _bad(count) {
    const found = [];
    if (!this._rows.some(({ spoilt }) => spoilt)) return found;
    for (let i = 0; i < count; i++) {
      const all = this._rows.reduce((all, { bits }) => all | bits(i), 0);
      if (all) found.push([i, all]);
    }
    return found;
  }

  range(low, high) {
    if (low === null || high === null) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.05, high * (high / low) ** 0.05];
    const bottom = this.zero ? Math.min(0, low) : low;
    const pad = 0.06 * (high - bottom) || Math.abs(high) * 0.1 || 1;
    return [this.zero && low >= 0 ? 0 : bottom - pad, high + pad];
  }

  // Of the y axis, where it is not uPlot's own.
  splits(low, high, most) {
    return this.log ? logTicks(low, high, most) : null;
  }

  // What is drawn, the topmost last: of each part its band and the raw values behind an average first.
  _lines() {
    const soft = this.settings.smoothing > 0;
    const found = [];
    this.parts.forEach((part, at) => {
      const colour = () => partColour(this.theme, at);
      const put = (key, look) => found.push({ key: `${part.name} ${key}`, part: at, ...look });
      const line = (key, look) => {
        if (soft) put(`${key} raw`, { ...look, alpha: 0.3, width: 1 });
        put(key, look);
      };
      // Faint, but there: a spike in a single column of pixels would have a band too thin to be seen.
      for (const edge of ["high", "low"]) put(edge, { colour, alpha: 0.35, width: 1, band: edge === "high" });
      if (this._past(part)) line("past", { colour, width: 1.5, dash: PAST_DASH });
      for (const rank of part.curves.keys()) {
        if (!this._chosen(part, rank)) continue;
        line(`rank ${rank}`, {
          colour: () => this._rankColour(at, rank),
          width: 1.25,
          dash: rankDash(this.theme, rank),
        });
      }
      line("mean", { colour, width: 2 });
    });
    return found;
  }

  series() {
    return this._shownLines.map(({ colour, alpha, width, dash = [], key }, at) => {
      const stroke = () => (alpha ? faint(colour(), alpha) : colour());
      const show = (plot) => !alpha && few(plot.data[at + 1]);
      return { label: key, stroke, width, dash, points: { show, size: 5, fill: stroke } };
    });
  }

  bands() {
    const found = [];
    this._shownLines.forEach(({ band, colour }, i) => {
      if (band) found.push({ series: [i + 1, i + 2], fill: () => faint(colour(), 0.2) });
    });
    return found;
  }

  // The legend of the chart: what each part is now, or where the cursor is.
  legend(at = null) {
    const rows = this.parts.map((part, i) => {
      const { text, tone } =
        at === null ? nowWords(part.curves, this.word, this.settings.over) : this._there(this._rows[i], at);
      return { colour: this.parts.length > 1 ? partColour(this.theme, i) : null, name: part.label, value: text, tone };
    });
    if (this.log && this.hidden) rows.push({ name: "", value: "values ≤ 0 are not on a log scale", tone: "wait" });
    const compared = this.parts.findIndex((part) => this._past(part));
    if (compared >= 0) rows.push(this._before(compared, at));
    return rows;
  }

  // The earlier run: how it ended, or how it was where the cursor is.
  _before(part, at) {
    const { past } = this._rows?.[part] ?? {};
    const near = at === null || !past ? null : nearest(past, at);
    const value = this.word(near === null ? this._past(this.parts[part]).last : past[near]);
    const colour = partColour(this.theme, part);
    return { colour, dash: PAST_DASH, name: this.settings.past.title, value: near === null ? `last ${value}` : value };
  }

  // A band holds joined neighbours, too; what is said to be across ranks is of this place alone.
  _there({ mean, low, high, ranks, lows, highs, bits }, at) {
    const near = mean[at] === null ? at : nearest(mean, at);
    const middles = lows.flatMap((list, i) => {
      const there = list[near] === null ? null : nearest(list, near);
      return there === null ? [] : [list[there] + (highs[i][there] - list[there]) / 2];
    });
    const ends = ranks.length > 1 ? [Math.min(...middles), Math.max(...middles)] : [low[near], high[near]];
    return thereWords(this.word, mean[near], ...ends, ranks.length > 1 ? middles.length : 1, bits(at));
  }

  // The line that is not to be covered.
  main() {
    return this._rows[0]?.mean ?? [];
  }

  // Beside the cursor: of each part the mean, and the chosen ranks; of a single part also which rank is lowest and which
  // highest.
  rows(at) {
    return this.parts.flatMap((part, i) => {
      const { mean, ranks } = this._rows[i];
      const near = nearest(mean, at);
      const name = part.label || (ranks.length > 1 ? "mean" : "");
      const said = () => this.word(mean[near]) + this._average(i, "mean", near);
      const own = near === null ? [] : [{ colour: partColour(this.theme, i), name, value: said() }];
      const extremes = near === null || this.parts.length > 1 ? [] : this._extremes(this._rows[i], near);
      const chosen = ranks.filter((rank) => this._chosen(part, rank)).slice(0, NAMED);
      return [...own, ...extremes, ...chosen.flatMap((rank) => this._line(i, rank, at))];
    });
  }

  _line(i, rank, at) {
    const [part, { ranks, lows, highs }] = [this.parts[i], this._rows[i]];
    const which = ranks.indexOf(rank);
    const there = nearest(lows[which], at);
    if (there === null) return [];
    const name = [part.label, `rank ${rank}`].filter(Boolean).join(" ");
    const value = range(this.word, lows[which][there], highs[which][there]) + this._average(i, `rank ${rank}`, there);
    return [{ colour: this._rankColour(i, rank), dash: rankDash(this.theme, rank), name, value }];
  }

  // Where a line is smoothed: what it is there.
  _average(part, key, at) {
    const line = this.settings.smoothing ? this._rows[part].drawn.get(`${this.parts[part].name} ${key}`) : null;
    return typeof line?.[at] === "number" ? `, smoothed ${this.word(line[at])}` : "";
  }

  // Where several parts share a chart, a rank has the colour of its part.
  _rankColour(part, rank) {
    return this.parts.length > 1 ? partColour(this.theme, part) : rankColour(this.theme, rank);
  }

  // Which rank is lowest, and which highest.
  _extremes({ low, high, ranks, lows, highs }, at) {
    if (ranks.length < 2 || low[at] === high[at]) return [];
    const who = (lists, value) => ranks[lists.findIndex((list) => list[at] === value)];
    const [least, most] = [who(lows, low[at]), who(highs, high[at])];
    const named = [least !== undefined && `lowest rank ${least}`, most !== undefined && `highest rank ${most}`];
    return [{ name: named.filter(Boolean).join(", "), value: "", soft: true }];
  }

  // Every curve by a name of its own, for a table. `title`: the chart's.
  named(title) {
    return this.parts.flatMap(({ name, curves }) => {
      const own = this.parts.length > 1 ? name : title;
      return [...curves].map(([rank, series]) => ({ name: curves.size > 1 ? `${own} rank ${rank}` : own, series }));
    });
  }

  // The curves of all parts as they are drawn: those of the ranks, then the earlier run's, part by part.
  _all() {
    return this.parts.flatMap((part) => [...part.curves.values(), ...[this._past(part)].filter(Boolean)]);
  }

  _past(part) {
    const found = this.settings.past?.curves.get(part.name);
    return found?.length ? found : null;
  }

  _chosen(part, rank) {
    return part.curves.size > 1 && this.settings.ranks.has(rank);
  }
}

function few(list) {
  let count = 0;
  for (const value of list) if (value !== null && value !== undefined && ++count > FEW) return false;
  return true;
}
