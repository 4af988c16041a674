// The charts of one tab: made when their first value comes, and words while there are none.

import { Chart } from "./chart.js";
import { Curves } from "./curves.js";
import { element, text } from "./dom.js";

export class Board {
  // `look(name)` says how the chart of that name is drawn: { title, unit, word, zero }.
  constructor({ axis, theme, look }) {
    Object.assign(this, { axis, theme, look });
    this._charts = new Map();
    this._empty = element("p", { class: "nbt-empty" });
    this._grid = element("div", { class: "nbt-grid" });
    this.node = element("div", { class: "nbt-board" }, this._empty, this._grid);
  }

  // `names`: name of a chart -> rank -> Series; `empty`: what is said while there is none.
  update(names, empty) {
    for (const [name, chart] of this._charts) {
      if (names.has(name)) continue;
      chart.close();
      this._charts.delete(name);
    }
    for (const [name, curves] of names) {
      if (![...curves.values()].some((one) => one.length)) continue;
      if (!this._charts.has(name)) this._charts.set(name, this._make(name));
      const chart = this._charts.get(name);
      if (chart.content.take(curves)) chart.draw();
    }
    this._empty.hidden = this._charts.size > 0;
    text(this._empty, empty);
  }

  close() {
    for (const chart of this._charts.values()) chart.close();
    this._charts.clear();
  }

  _make(name) {
    const { axis, theme } = this;
    const { title = name, unit = "", ...drawn } = this.look(name);
    const chart = new Chart({ title, unit, axis, theme, content: new Curves({ theme, ...drawn }) });
    this._grid.append(chart.node);
    return chart;
  }
}
