// What is known of one run: the messages of its feed in, a state out that views read.

import { Series } from "./series.js";

const PATIENCE = 2000; // milliseconds until everything is asked for once more

const nextFrame = (callback) => requestAnimationFrame(callback);

export class Store {
  // `ask()` is called when a message was missed: whoever sends them should send everything again.
  constructor(ask = () => {}, { frame = nextFrame, clock = () => performance.now() } = {}) {
    this._ask = ask;
    this._frame = frame;
    this._clock = clock;
    this._listeners = new Set();
    this._hearers = new Set();
    this._due = false;
    this._asked = -Infinity;
    this._seq = null;
    this.run = null;
    this.now = 0; // seconds since the run began, when `heard`
    this.heard = null; // on this page's clock
    this.ranks = new Map(); // rank -> its row
    this.progress = null;
    this.alerts = []; // sentences about metrics that are not finite
    this.series = new Map(); // "chart/name/rank" -> Series
    this.ended = null;
    this.homeward = false; // its ranks have ended, and what they did waits until the notebook is idle
    this.lost = null; // { how, state, text }: nothing more will be heard of a run whose end was not heard
    this.acks = new Map(); // id of a command -> what became of it
    this.send = null; // speaks to the kernel, where there is a way
    this.earlier = []; // runs to compare with: { number, title }
    this.compared = new Map(); // number of one -> { title, curves: name of a metric -> Series }
  }

  // The number of the last message.
  get seq() {
    return this._seq ?? -1;
  }

  get over() {
    return Boolean(this.ended || this.lost);
  }

  // Whether nothing more can be told to its ranks.
  get idle() {
    return this.over || this.homeward;
  }

  // Seconds since the run began, now.
  get elapsed() {
    return this.now + this.silence;
  }

  // Seconds since anything was heard of a run that goes on.
  get silence() {
    return this.idle || this.heard === null ? 0 : (this._clock() - this.heard) / 1000;
  }

  receive(message) {
    if (message.kind === "ack") this.acks.set(message.id, message);
    else if (message.kind === "earlier") this.earlier = message.runs;
    else if (message.kind === "compared") this.compared.set(message.run, earlierRun(message));
    else if (message.kind === "all") this._begin(message);
    else if (message.kind === "news" || message.kind === "end") {
      if (this._seq !== null && message.seq <= this._seq) return; // known already
      // What came is shown all the same: a busy kernel may not answer before its cell ends.
      if (this._seq === null || message.seq > this._seq + 1) this.ask();
      this._add(message);
    } else return;
    this._changed();
  }

  // The run can no longer be followed: its clock stands, and its ranks are no longer said to do anything.
  lose(lost) {
    if (this.ended || this.lost?.text === lost.text) return;
    this.now = this.elapsed;
    this.lost = lost;
    this._changed();
  }

  ask() {
    if (this._clock() - this._asked < PATIENCE) return;
    this._asked = this._clock();
    this._ask();
  }

  // `listener(store)` is called at most once a frame. Returns what ends that.
  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  // `listener(store)` is called at once, also in a tab that is not drawn. Returns what ends that.
  listen(listener) {
    this._hearers.add(listener);
    return () => this._hearers.delete(listener);
  }

  _begin(message) {
    this._asked = -Infinity;
    this._heard(message);
    this.run = message.run;
    this.ranks = new Map(message.ranks.map((row) => [row.rank, { ...row }]));
    this.progress = message.progress;
    this.alerts = message.alerts ?? [];
    this.ended = message.ended;
    this.homeward = Boolean(message.homeward);
    this.series = new Map(Object.entries(message.series).map(([key, one]) => [key, Series.from(one)]));
  }

  _add(message) {
    this._heard(message);
    for (const row of message.ranks ?? []) this.ranks.set(row.rank, { ...this.ranks.get(row.rank), ...row });
    for (const [key, [xs, ys]] of Object.entries(message.points ?? {})) {
      if (!this.series.has(key)) this.series.set(key, new Series());
      const series = this.series.get(key);
      xs.forEach((x, i) => series.add(x, ys[i]));
    }
    if (message.progress !== undefined) this.progress = message.progress;
    if (message.alerts !== undefined) this.alerts = message.alerts;
    if (message.ended !== undefined) this.ended = message.ended;
    if (message.homeward) this.homeward = true;
  }

  _heard(message) {
    this._seq = message.seq;
    this.lost = null;
    this.now = message.now;
    this.heard = this._clock();
  }

  _changed() {
    for (const listener of [...this._hearers]) listener(this);
    if (this._due) return;
    this._due = true;
    this._frame(() => {
      this._due = false;
      for (const listener of [...this._listeners]) listener(this);
    });
  }
}

function earlierRun({ title, curves }) {
  return { title, curves: new Map(Object.entries(curves).map(([name, one]) => [name, Series.from(one)])) };
}

// What the views show of the keys: chart -> name -> rank -> Series, names in the order they came, ranks in theirs.
export function charts(series) {
  const found = new Map();
  for (const [key, one] of series) {
    const [begin, end] = [key.indexOf("/"), key.lastIndexOf("/")];
    if (begin < 0 || end <= begin) continue;
    const [chart, name, rank] = [key.slice(0, begin), key.slice(begin + 1, end), Number(key.slice(end + 1))];
    if (!found.has(chart)) found.set(chart, new Map());
    const names = found.get(chart);
    if (!names.has(name)) names.set(name, new Map());
    names.get(name).set(rank, one);
  }
  for (const names of found.values()) {
    for (const [name, ranks] of names) names.set(name, new Map([...ranks].sort(([a], [b]) => a - b)));
  }
  return found;
}
