// A run that never was, as its feed would tell it: for looking at the front end, and for measuring it.

const LONG = "a/very/long/name/of/a/metric/that/somebody/gave/without/thinking";
const LAYERS = Array.from({ length: 18 }, (_, i) => `gradients/layer${i}`);
const NAMES = ["loss", "accuracy", LONG, "learning rate", "val_loss", "val_accuracy", ...LAYERS];
const VALIDATED = 20; // steps

export class FakeRun {
  constructor({
    ranks = 4,
    gpu = false,
    metrics = 4,
    batches = 1200,
    slow = null,
    waits = "data",
    long = false,
    nan = null,
  } = {}) {
    Object.assign(this, { ranks, gpu, batches, slow, waits, long, nan });
    this.names = NAMES.slice(0, metrics);
    this.seconds = 0;
    this.seq = 0;
    this.step = 0;
    this._seed = 1;
    const device = (rank) => (gpu ? `cuda:${rank}` : "cpu");
    this.run = {
      id: "5f0c",
      pid: 4711,
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
        if (!name.startsWith("val_") || this.step % VALIDATED === 0)
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

  // Two earlier runs, as their mean.
  earlier() {
    return {
      kind: "earlier",
      runs: [2, 3].map((number) => ({ number, title: `run ${number} · ddp · loss 0.2${number}` })),
    };
  }

  compared(number) {
    const x = Array.from({ length: 90 }, (_, i) => 10 * i);
    const curve = (y) => ({ x, low: x.map(y), high: x.map(y), last: y(890), count: 90, width: 1 });
    const loss = curve((step) => (2.6 + 0.1 * number) * Math.exp(-step / 300) + 0.2);
    return {
      kind: "compared",
      run: number,
      title: `run ${number}`,
      curves: { loss, accuracy: curve((step) => 1 - Math.exp(-step / 300)) },
    };
  }

  _odd() {
    const from = this.nan ?? Infinity;
    return this.step > from ? { alerts: [`loss is NaN: first at step ${from + 1}, rank ${this.ranks - 1}`] } : {};
  }

  _metric(name, rank) {
    const t = this.step / 400;
    if (name === "loss" && this.nan !== null && rank === this.ranks - 1 && this.step > this.nan) return null;
    if (name.endsWith("accuracy")) return 1 - Math.exp(-t * (name === "accuracy" ? 1 : 0.8)) + 0.02 * this._noise();
    if (name === "val_loss") return 2.4 * Math.exp(-t * 0.9) + 0.25 + 0.01 * rank + 0.03 * this._noise();
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
