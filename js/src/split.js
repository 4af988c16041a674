// The tab about a step: a sentence about where its time goes, a bar for each rank, and the course of it.

import { Chart } from "./chart.js";
import { attribute, element, style, text } from "./dom.js";
import { milliseconds, percent } from "./format.js";
import { Layers } from "./layers.js";
import { NAMES, PHASES, sentence, split, total } from "./phases.js";

const WIDE = 0.12; // a part that is narrower has no room for its share

export class Split {
  constructor({ axis, theme }) {
    this._theme = theme;
    this._words = element("p", { class: "nbt-sentence" });
    const keys = PHASES.map((name) =>
      element("span", { class: "nbt-key" }, element("i", { "data-phase": name }), NAMES[name]),
    );
    this._legend = element("div", { class: "nbt-legend" }, ...keys);
    this._bars = element("div", {
      class: "nbt-splits",
      tabindex: 0,
      role: "group",
      "aria-label": "a step of each rank",
    });
    this._rows = new Map();
    this._chart = new Chart({
      title: "a step over time",
      unit: "mean of the ranks",
      axis,
      theme,
      content: new Layers(theme),
    });
    this.node = element("div", { class: "nbt-board" }, this._words, this._legend, this._bars, this._chart.node);
  }

  update(phases, empty) {
    const parts = split(phases);
    const known = parts.size > 0;
    for (const node of [this._legend, this._bars, this._chart.node]) node.hidden = !known;
    this._words.classList.toggle("nbt-empty", !known);
    text(this._words, (known && sentence(parts)) || empty);
    if (!known) return;
    const longest = Math.max(...[...parts.values()].map(total));
    for (const [rank, row] of this._rows) {
      if (parts.has(rank)) continue;
      row.node.remove();
      this._rows.delete(rank);
    }
    for (const [rank, one] of parts) {
      if (!this._rows.has(rank)) this._add(rank);
      this._rows.get(rank).update(one, longest);
    }
    if (this._chart.content.take(phases)) this._chart.draw();
  }

  close() {
    this._chart.close();
  }

  _add(rank) {
    const row = new Bar(rank);
    this._rows.set(rank, row);
    this._bars.append(row.node);
  }
}

class Bar {
  constructor(rank) {
    this._parts = PHASES.map((name) => element("i", { "data-phase": name }));
    this._words = element("span", { class: "nbt-soft" });
    const bar = element("span", { class: "nbt-split" }, ...this._parts);
    this.node = element("div", { class: "nbt-split-row" }, element("span", {}, `rank ${rank}`), bar, this._words);
  }

  update(one, longest) {
    const step = total(one);
    PHASES.forEach((name, i) => {
      const share = step ? one[name] / step : 0;
      const width = longest ? (100 * one[name]) / longest : 0;
      style(this._parts[i], { width: `${width.toFixed(2)}%` });
      attribute(this._parts[i], "title", `${NAMES[name]}: ${milliseconds(one[name])}, ${percent(share)}`);
      text(this._parts[i], width / 100 >= WIDE ? percent(share) : "");
    });
    text(this._words, milliseconds(step));
  }
}
