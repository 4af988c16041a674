// What became of a run that is heard of no more: its kernel may have been restarted, or have ended.

import { ask, server } from "./jupyter.js";

const QUIET = 5; // seconds without news after which the server is asked
const EVERY = 5000; // milliseconds between two questions

const LONG = 3500; // the server asks every kernel before it answers

// How the run is called, what its ranks do, and a sentence.
const LOST = {
  restarted: ["kernel restarted", "ended", "The kernel was restarted; this run is over."],
  gone: ["kernel ended", "ended", "The kernel has ended; this run is over."],
  over: ["over", "ended", "This run is over."],
  unknown: ["connection lost", "not known", "The connection to the kernel is lost; this run may be over."],
};

// runs, over, restarted, gone; unknown where nobody can say it. `seen`: the server has known of this kernel's ranks.
// Only then is it a sign of a restart that it knows of none: a kernel behind a gateway or in a container it never sees.
export async function whereabouts({ kernel, id, pid }, { find = server, seen = false } = {}) {
  const behind = kernel ? find() : null;
  if (!behind) return "unknown";
  const pools = await ask(behind, "nbtrain/api/pools", null, LONG);
  const pool = Array.isArray(pools.body) ? pools.body.find((one) => one.kernel === kernel) : null;
  if (pool) {
    if (pid && pool.pid !== pid) return "restarted";
    if (pool.state === "silent") return "runs"; // busy, and the same process
    return pool.run?.id === id ? "runs" : "over";
  }
  const found = await ask(behind, `api/kernels/${encodeURIComponent(kernel)}`);
  if (found.status === 404) return "gone";
  return seen && found.status === 200 && Array.isArray(pools.body) ? "restarted" : "unknown";
}

export const isOver = (where) => ["restarted", "gone", "over"].includes(where);

export function lost(where) {
  const [how, state, text] = LOST[where];
  return { how, state, text };
}

// Asks once when a run is first heard of, while it is silent, and at once when the connection to its kernel is lost. A
// run that goes on is then followed through the server.
export class Liveness {
  constructor(store, { find = server } = {}) {
    this._store = store;
    this._find = find;
    this._seen = false; // whether the server knew of the kernel's ranks
    this._asked = null; // the run that it was asked about when that was first heard of
    this._deaf = store.listen(() => this._meet());
    this._clock = setInterval(() => (store.silence > QUIET || store.homeward) && this.check(), EVERY);
  }

  // `connected`: messages may still come.
  async check(connected = true) {
    const { run } = this._store;
    if (!run || this._store.over) return;
    const where = await this.whereabouts(run);
    if (isOver(where) || !(connected || where === "runs")) this._store.lose(lost(where));
    else if (where === "runs") await this._follow(run);
  }

  async whereabouts(run) {
    const where = await whereabouts(run, { find: this._find, seen: this._seen });
    this._seen ||= where === "runs" || where === "over";
    return where;
  }

  disconnected() {
    return this.check(false);
  }

  close() {
    clearInterval(this._clock);
    this._deaf();
  }

  // After a restart it is too late to find out whether the server sees the kernel's ranks.
  _meet() {
    const { run, over } = this._store;
    if (!run || over || run.id === this._asked) return;
    this._asked = run.id;
    this.whereabouts(run);
  }

  async _follow({ kernel, id }) {
    const { body } = await ask(this._find(), `nbtrain/api/pools/${encodeURIComponent(kernel)}/run`, null, LONG);
    if (body?.kind === "all" && body.run.id === id && body.seq > this._store.seq) this._store.receive(body);
  }
}
