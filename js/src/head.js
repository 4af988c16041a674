// The first lines of a run: what it is, how long, how fast, how far.

import { attribute, element, style, text } from "./dom.js";
import { duration, place, quantity, share } from "./format.js";
import { GLYPHS } from "./table.js";

const QUIET = 5; // seconds without news after which the panel says so
const TONES = { done: "good", stopped: "quiet", failed: "bad" };

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
    this._why = element("div", { class: "nbt-why", hidden: true });
    const line = element("div", { class: "nbt-head" }, this._state, this._title, this._figures, controls.buttons);
    this.nodes = [line, this._progress, this._why, controls.said];
  }

  update(store) {
    const { run, ended, ranks } = store;
    const how = ended?.how ?? (run ? "running" : "waiting");
    const tone = ended || !run ? (TONES[how] ?? "quiet") : "busy";
    text(this._state, `${GLYPHS[tone]} ${how}`);
    attribute(this._state, "data-tone", tone);
    text(
      this._title,
      run ? [run.cell ? `In [${run.cell}]` : "", run.summary].filter(Boolean).join(" · ") : "nothing heard yet",
    );
    const rates = [...ranks.values()].map((row) => row.rate).filter(Number.isFinite);
    const rate = rates.length ? `${quantity(rates.reduce((sum, one) => sum + one, 0))} samples/s` : "";
    const silence = store.silence > QUIET ? `nothing heard for ${duration(store.silence)}` : "";
    text(this._figures, [rate, duration(store.elapsed), silence].filter(Boolean).join(" · "));
    this._why.hidden = !ended?.text;
    text(this._why, ended?.text ?? "");
    attribute(this._why, "data-tone", tone);
    this._far(store.progress && ended ? { ...store.progress, left: null } : store.progress);
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
