// A run that never was, as its feed would tell it: for looking at the front end, and for measuring it.

const NAMES = ["loss", "accuracy", "a/very/long/name/of/a/metric/that/somebody/gave/without/thinking", "learning rate"];

const NAN_FROM = 400;

export class FakeRun {
  constructor({ ranks = 4, gpu = false, metrics = 4, batches = 1200, slow = null, waits = "data", long = false, nan = false } = {}) {
    Object.assign(this, { ranks, gpu, batches, slow, waits, long, nan });
    this.names = Array.from({ length: metrics }, (_, i) => NAMES[i] ?? `layer ${i - 3}/gradient norm`);
    this.seconds = 0;
    this.seq = 0;
    this.step = 0;
    this._seed = 1;
    const device = (rank) => (gpu ? `cuda:${rank}` : "cpu");
    this.run = {
      id: "5f0c",
      cell: 7,
      summary: `ddp · ${ranks} rank${ranks === 1 ? "" : "s"} · ${gpu ? "cuda" : "cpu"} · batch 32 × ${ranks}`,
      strategy: "ddp",
      devices: Array.from({ length: ranks }, (_, rank) => device(rank)),
      began: 1790000000,
      kernel: "0b5d0f1e-6a2c-4d0e-9f57-000000000001",
      background: false,
    };
  }

  // Everything until now, of a run that is new.
  all() {
    const ranks = this._each((rank) => this._row(rank));
    return {
      kind: "all",
      seq: this.seq,
      run: this.run,
      now: this.seconds,
      ranks,
      progress: this._progress(),
      alerts: [],
      series: {},
      ended: null,
    };
  }

  // What came in the next tenth of a second.
  news(seconds = 0.1, steps = 3) {
    const points = {};
    const put = (key, x, y) => {
      points[key] ??= [[], []];
      points[key][0].push(x);
      points[key][1].push(y);
    };
    for (let i = 0; i < steps; i++) {
      this.step += 1;
      for (const name of this.names)
        this._each((rank) => put(`metric/${name}/${rank}`, this.step, this._metric(name, rank)));
    }
    this.seconds += seconds;
    this._each((rank) => {
      const at = (key, y) => put(`${key}/${rank}`, this.seconds, y);
      const row = this._row(rank);
      at("speed/samples", row.rate);
      at("speed/steps", row.rate / 32);
      at("memory/used", row.memory);
      if (this.gpu) {
        at("memory/allocated", row.allocated);
        at("memory/reserved", row.reserved);
        at("compute/tflops", 41 + this._noise());
        at("compute/share", 0.13 + 0.01 * this._noise());
      }
      for (const [phase, took] of Object.entries(this._phases(rank))) at(`phases/${phase}`, took);
    });
    this.seq += 1;
    const ranks = this._each((rank) => this._row(rank));
    return { kind: "news", seq: this.seq, now: this.seconds, ranks, points, progress: this._progress(), ...this._odd() };
  }

  end(how, words = "") {
    const state = { done: "done", stopped: "stopped", failed: "stopped", killed: "killed" }[how];
    const ranks = this._each((rank) => ({
      rank,
      state,
      tone: how === "done" ? "good" : "quiet",
      ended: true,
      detail: "",
    }));
    if (how === "failed")
      Object.assign(ranks[ranks.length - 1], { state: "failed", detail: "OutOfMemoryError", tone: "bad" });
    this.seq += 1;
    return { kind: "end", seq: this.seq, now: this.seconds, ended: { how, text: words }, ranks, points: {} };
  }

  _row(rank) {
    const steps = this.step;
    const GB = 1e9;
    const base = this.gpu ? 11.2 * GB : 0.31 * GB;
    const memory = Math.round(base * (1 + 0.02 * rank + 0.01 * this._noise()));
    const waiting = this.slow !== null && rank !== this.slow;
    const state = !steps
      ? "preparing"
      : waiting
        ? "in all_reduce of 1,024"
        : rank % 3 === 2
          ? "waiting for data"
          : "running";
    const line = this.long
      ? `epoch 3: 100%|██████████████████████████| 1200/1200 [00:42<00:00, 28.3it/s, loss=0.0231, lr=3.0e-04, rank=${rank}]`
      : `step ${steps} ok`;
    return {
      rank,
      device: this.run.devices[rank],
      state,
      detail: "",
      tone: state === "running" ? "busy" : state === "preparing" ? "quiet" : "wait",
      ended: false,
      step: steps,
      rate: steps ? 900 + 12 * rank + 20 * this._noise() : null,
      memory,
      peak: Math.round(memory * 1.18),
      limit: this.gpu ? 16 * GB : 25.2 * GB,
      process: memory,
      allocated: this.gpu ? Math.round(memory * 0.8) : 0,
      reserved: this.gpu ? memory : 0,
      retries: 0,
      use: 1.9 + 0.1 * this._noise(),
      card: this.gpu ? 0.87 : null,
      line: steps ? line : "",
    };
  }

  _odd() {
    return this.nan && this.step >= NAN_FROM ? { alerts: [`loss is NaN: first at step ${NAN_FROM}, rank 0`] } : {};
  }

  _metric(name, rank) {
    if (this.nan && name === "loss" && this.step >= NAN_FROM) return null;
    const t = this.step / 400;
    if (name === "accuracy") return 1 - Math.exp(-t) + 0.02 * this._noise();
    if (name === "learning rate") return 3e-4 * Math.min(1, t);
    const spike = this.step % 977 === 976 ? 1 : 0;
    return 2.3 * Math.exp(-t) + 0.1 + 0.02 * rank + 0.05 * this._noise() + spike;
  }

  _phases(rank) {
    const wait = this.slow === null || rank === this.slow ? 0.8 : 18;
    const more = rank === this.slow ? 17 : 0;
    const data = this.waits === "data" ? 21 : 0.3;
    const jitter = () => 1 + 0.1 * this._noise();
    return {
      data: data * jitter(),
      forward: (4.2 + more) * jitter(),
      backward: 7.9 * jitter(),
      communication: wait * jitter(),
      optimizer: 1.4 * jitter(),
      rest: 0.6 * jitter(),
    };
  }

  _progress() {
    const done = this.step % this.batches;
    return {
      epoch: 1 + Math.floor(this.step / this.batches),
      done,
      total: this.batches,
      left: (this.batches - done) / 30,
    };
  }

  _each(make) {
    return Array.from({ length: this.ranks }, (_, rank) => make(rank));
  }

  _noise() {
    this._seed = (this._seed * 48271) % 2147483647;
    return (2 * this._seed) / 2147483647 - 1;
  }
}
