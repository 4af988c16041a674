// The controls above the charts of metrics: smoothing, log scale, and an earlier run to compare with.

import { attribute, element, text } from "./dom.js";

export class CurveTools {
  constructor(settings, store) {
    Object.assign(this, { settings, store });
    const slide = () => this._smooth(Number(this._slider.value));
    this._slider = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: slide });
    this._weight = element("output", { class: "nbt-weight" }, "0");
    const log = () => settings.change({ log: !settings.log });
    this._log = element("button", { type: "button", "aria-pressed": "false", onclick: log }, "log scale");
    this._select = element("select", { onchange: () => this._compare() });
    this._with = element("label", { hidden: true }, "compare with ", this._select);
    const smoothing = element(
      "label",
      { title: "exponential moving average" },
      "smoothing ",
      this._slider,
      this._weight,
    );
    this.node = element(
      "div",
      { class: "nbt-tools", role: "group", "aria-label": "curves" },
      smoothing,
      this._log,
      this._with,
    );
    attribute(this.node, "data-lm-suppress-shortcuts", "true"); // JupyterLab leaves arrows to the slider
    this._asked = null; // the run for which it was asked what there is to compare with
    this._listed = null;
    this._wanted = null; // the number of an earlier run
    settings.subscribe(() => attribute(this._log, "aria-pressed", String(settings.log)));
  }

  update() {
    const { store } = this;
    if (store.send && store.run && store.run.id !== this._asked) {
      this._asked = store.run.id;
      store.send({ kind: "earlier" });
    }
    if (store.earlier !== this._listed) this._list(store.earlier);
    const found = this._wanted === null ? null : store.compared.get(this._wanted);
    if (found !== undefined && found !== this.settings.past) this.settings.change({ past: found });
  }

  _smooth(smoothing) {
    text(this._weight, String(smoothing));
    this.settings.change({ smoothing });
  }

  _list(runs) {
    this._listed = runs;
    const option = ({ number, title }) => element("option", { value: number }, title);
    this._select.replaceChildren(element("option", { value: "" }, "no other run"), ...[...runs].reverse().map(option));
    this._select.value = this._wanted ?? "";
    this._with.hidden = !runs.length;
  }

  _compare() {
    this._wanted = this._select.value === "" ? null : Number(this._select.value);
    if (this._wanted !== null && !this.store.compared.has(this._wanted))
      this.store.send({ kind: "compare", run: this._wanted });
    this.update();
  }
}
