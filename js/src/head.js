// The first lines of a run: what it is, how long, how fast, how far.

import { attribute, element, style, text } from "./dom.js";
import { duration, place, quantity, share } from "./format.js";
import { GLYPHS } from "./table.js";

const QUIET = 5; // seconds without news after which the panel says so
const TONES = { running: "busy", done: "good", failed: "bad" };

export class Head {
  constructor(controls) {
    this._state = element("span", { class: "nbt-run-state" });
    this._title = element("span", { class: "nbt-title" });
    this._figures = element("span", { class: "nbt-figures" });
    this._bar = element("i");
    const bar = element("span", { class: "nbt-bar nbt-progress-bar" }, this._bar);
    this._place = element("span", { class: "nbt-place" });
    this._progress = element(
      "div",
      { class: "nbt-progress", role: "progressbar", "aria-label": "progress" },
      bar,
      this._place,
    );
    this._alerts = element("div", { class: "nbt-alerts", "data-tone": "bad", hidden: true });
    this._why = element("div", { class: "nbt-why", hidden: true });
    const line = element("div", { class: "nbt-head" }, this._state, this._title, this._figures, controls.buttons);
    this._controls = controls;
    this.nodes = [line, this._alerts, this._progress, this._why, controls.said];
  }

  update(store) {
    const { run, ended, lost, homeward, ranks, alerts } = store;
    const how = (ended ?? lost)?.how ?? (!run ? "waiting" : homeward ? "ranks ended" : "running");
    const odd = Boolean(lost) || (alerts.length > 0 && how === "done");
    const tone = odd ? "wait" : (TONES[how] ?? "quiet");
    text(this._state, `${odd ? WARNING : GLYPHS[tone]} ${how}`);
    attribute(this._state, "data-tone", tone);
    text(
      this._title,
      run ? [run.cell ? `In [${run.cell}]` : "", run.summary].filter(Boolean).join(" · ") : "no news of a run yet",
    );
    const rates = [...ranks.values()].map((row) => row.rate).filter(Number.isFinite);
    const over = ended || homeward ? " on average" : "";
    const rate = rates.length && !lost ? `${quantity(rates.reduce((sum, one) => sum + one, 0))} samples/s${over}` : "";
    const silence = store.silence > QUIET ? `no news for ${duration(store.silence)}` : "";
    const frozen = this._controls.frozen ? "frozen" : "";
    text(this._figures, [frozen, silence, rate, duration(store.elapsed)].filter(Boolean).join(" · "));
    this._alerts.hidden = !alerts.length;
    text(this._alerts, alerts.map((words) => `${WARNING} ${words}`).join("\n"));
    const why = ended || lost ? (ended ?? lost).text : homeward ? HOMEWARD : "";
    this._why.hidden = !why;
    text(this._why, why ?? "");
    attribute(this._why, "data-tone", tone);
    this._far(store.progress && store.idle ? { ...store.progress, left: null } : store.progress);
  }

  _far(progress) {
    this._progress.hidden = !progress;
    if (!progress) return;
    const done = share(progress);
    this._bar.parentNode.hidden = done === null;
    style(this._bar, { width: `${(100 * (done ?? 0)).toFixed(1)}%` });
    attribute(this._progress, "aria-valuenow", done === null ? null : Math.round(100 * done));
    text(this._place, place(progress));
    attribute(this._progress, "aria-valuetext", place(progress));
  }
}

const WARNING = "⚠";
const HOMEWARD = "What the run did comes home as soon as the notebook is idle.";
