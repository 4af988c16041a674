// The charts of one tab: made when their first value comes, under headings where there are many, and words while there
// are none.

import { Chart } from "./chart.js";
import { csv } from "./csv.js";
import { Curves } from "./curves.js";
import { attribute, element, text } from "./dom.js";
import { grouped } from "./metric_charts.js";

const each = (names) =>
  [...names].map(([name, curves]) => ({ key: name, title: name, parts: [{ name, label: "", curves }] }));

export class Board {
  // `look(name)` says how the chart of that name is drawn: { title, unit, word, zero }. `arrange(names)`: which curves
  // share a chart. `above`: what is shown above the charts while there are any.
  constructor({ axis, theme, settings, look, arrange = each, above = null }) {
    Object.assign(this, { axis, theme, settings, look, arrange });
    this._charts = new Map();
    this._sections = new Map();
    this._above = element("div", {}, ...(above ? [above] : []));
    this._empty = element("p", { class: "nbt-empty" });
    this._body = element("div");
    this.node = element("div", { class: "nbt-board" }, this._above, this._empty, this._body);
    this._away = settings.subscribe(() => {
      for (const chart of this._charts.values()) chart.draw();
    });
  }

  // `names`: name of a curve -> rank -> Series; `empty`: what is said while there is none.
  update(names, empty) {
    const begun = [...names].filter(([, curves]) => [...curves.values()].some((one) => one.length));
    const wanted = this.arrange(new Map(begun));
    this._forget(this._charts, new Set(wanted.map(({ key }) => key)), (chart) => chart.close());
    for (const { key, title, parts } of wanted) {
      if (!this._charts.has(key)) this._charts.set(key, this._make(key, title));
      const chart = this._charts.get(key);
      chart.rename(this.look(key).title ?? title);
      if (chart.content.take(parts)) chart.draw();
    }
    this._arrange(grouped(wanted));
    this._empty.hidden = this._charts.size > 0;
    this._above.hidden = this._charts.size === 0;
    text(this._empty, empty);
  }

  close() {
    this._away();
    for (const chart of this._charts.values()) chart.close();
    this._charts.clear();
  }

  _make(key, title) {
    const { axis, theme, settings } = this;
    const { title: own = title, unit = "", ...drawn } = this.look(key);
    const content = new Curves({ theme, settings, ...drawn });
    const copy = () => csv(axis.name, content.named(own));
    return new Chart({ title: own, unit, axis, theme, content, copy });
  }

  // Nothing is moved without need, for it may be in use.
  _arrange(groups) {
    const sections = groups.map(({ title, charts }) => {
      if (!this._sections.has(title)) this._sections.set(title, new Section(title));
      const section = this._sections.get(title);
      section.hold(charts.map(({ key }) => this._charts.get(key)));
      return section;
    });
    this._forget(this._sections, new Set(groups.map(({ title }) => title)), (section) => section.node.remove());
    sections.forEach(
      ({ node }, i) => this._body.children[i] !== node && this._body.insertBefore(node, this._body.children[i] ?? null),
    );
  }

  _forget(things, wanted, end) {
    for (const [key, thing] of things) {
      if (wanted.has(key)) continue;
      end(thing);
      things.delete(key);
    }
  }
}

// A grid of charts; with a title it can be closed.
class Section {
  constructor(title) {
    this._title = title;
    this._grid = element("div", { class: "nbt-grid" });
    this._summary = element("summary", {});
    this.node = title
      ? element("details", { class: "nbt-section", open: true }, this._summary, this._grid)
      : this._grid;
  }

  hold(charts) {
    text(this._summary, `${this._title} (${charts.length})`);
    attribute(this._grid, "data-count", Math.min(3, charts.length));
    for (const { place } of charts) if (place.parentNode !== this._grid) this._grid.append(place);
  }
}
