// One chart: uPlot, redrawn at most once a frame, as wide as its box, with the words above it and beside the cursor.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { element, style, text } from "./dom.js";

const HEIGHT = 136;

export class Chart {
  // `content` says what is drawn: see curves.js and layers.js.
  constructor({ title, unit, axis, theme, content }) {
    Object.assign(this, { axis, theme, content });
    this._value = element("span", { class: "nbt-chart-value" });
    this._note = element("div", { class: "nbt-tip", hidden: true });
    this._box = element("div", { class: "nbt-plot" }, this._note);
    const name = element("span", { class: "nbt-chart-name", title }, title);
    const all = { type: "button", hidden: true, title: "or double click", onclick: () => axis.zoom(null) };
    this._all = element("button", all, "show all");
    const head = element(
      "div",
      { class: "nbt-chart-head" },
      name,
      element("span", { class: "nbt-soft" }, unit ?? ""),
      this._value,
      this._all,
    );
    this.node = element("figure", { class: "nbt-chart", role: "group", "aria-label": title }, head, this._box);
    this._plot = null;
    this._shape = null; // of what the plot was made for
    this._width = 0;
    this._due = 0;
    this._seen = true;
    this._away = [axis.subscribe(() => this.draw()), theme.subscribe(() => this.draw())];
    this._size = new ResizeObserver(() => this._resized());
    this._size.observe(this._box);
    const sighted = (entries) => {
      this._seen = entries[entries.length - 1].isIntersecting;
      if (this._seen) this.draw();
    };
    this._sight = new IntersectionObserver(sighted, { rootMargin: "300px" });
    this._sight.observe(this._box);
  }

  // Soon: however much came in the meantime is drawn once.
  draw() {
    if (!this._due && this._seen) this._due = requestAnimationFrame(() => this._draw());
  }

  close() {
    cancelAnimationFrame(this._due);
    for (const end of this._away) end();
    this._size.disconnect();
    this._sight.disconnect();
    this._plot?.destroy();
    this.node.remove();
  }

  _resized() {
    const width = Math.floor(this._box.clientWidth);
    if (!width || width === this._width) return;
    this._width = width;
    this._plot?.setSize({ width, height: HEIGHT });
    this.draw();
  }

  _draw() {
    this._due = 0;
    if (!this._width) return;
    const [from, to] = this.axis.part ?? this._extent();
    this._all.hidden = !this.axis.part;
    this._from = from;
    this._to = to;
    this._shown = this.content.data(from, to, this._width);
    if (this.content.shape !== this._shape) {
      this._shape = this.content.shape;
      this._plot?.destroy();
      this._plot = this._make();
    } else {
      this._plot.setData(this._shown.data);
    }
    this._tell();
  }

  _extent() {
    const [from, to] = this.content.extent();
    return to > from ? [from, to] : [from - 0.5, from + 0.5];
  }

  _make() {
    const { axis, theme, content } = this;
    const line = { stroke: () => theme.soft, grid: { stroke: () => theme.grid, width: 1 }, ticks: { show: false } };
    const font = "11px system-ui, sans-serif";
    const options = {
      width: this._width,
      height: HEIGHT,
      padding: [6, 18, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: () => [this._from, this._to] },
        y: { range: (_, low, high) => content.range(low, high) },
      },
      axes: [
        { ...line, font, size: 22, gap: 3, space: 48, incrs: axis.steps, values: (_, at) => at.map(axis.tick) },
        { ...line, font, size: room, gap: 4, space: 20, values: (_, at) => at.map((y) => content.tick(y, at)) },
      ],
      series: [{}, ...content.series()],
      bands: content.bands(),
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        sync: { key: axis.key, scales: ["x", null], filters: { pub: moved, sub: moved } },
        bind: { dblclick: () => () => axis.zoom(null) },
      },
      hooks: { setCursor: [() => this._tell()], setSelect: [(plot) => this._select(plot)] },
    };
    return new uPlot(options, this._shown.data, this._box);
  }

  _select(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (to - from > 1e-6) this.axis.zoom(from, to);
  }

  // What is under the cursor, here or on another chart of the same x; the last value when there is none.
  _tell() {
    const plot = this._plot;
    if (!plot) return;
    const { left, top, idx } = plot.cursor;
    if (!(left >= 0) || idx === null || idx === undefined) {
      text(this._value, this.content.last());
      this._note.hidden = true;
      return;
    }
    text(this._value, this.content.brief(this._shown, idx));
    this._note.hidden = !plot.over.matches(":hover");
    if (this._note.hidden) return;
    const rows = this.content.rows(this._shown, idx, plot.posToVal(top, "y"));
    const place = element("div", { class: "nbt-tip-place" }, this.axis.word(this._shown.data[0][idx]));
    this._note.replaceChildren(place, ...rows.map((row) => tipRow(row)));
    const middle = plot.over.offsetLeft + left;
    // To the right as far as the panel goes, else to the left.
    const space = this._box.closest(".nbt-root").getBoundingClientRect().right - this._box.getBoundingClientRect().left;
    const wide = this._note.offsetWidth + 12;
    style(this._note, { left: `${middle + wide <= space ? middle + 12 : Math.max(0, middle - wide)}px` });
  }
}

function tipRow({ colour, name, value }) {
  const mark = element("i");
  if (colour) style(mark, { background: colour });
  return element("div", { class: "nbt-tip-row" }, mark, element("span", {}, name), element("b", {}, value));
}

// Only moves are shared: what is dragged in one chart zooms all through the axis.
const moved = (type) => type === "mousemove" || type === "mouseleave";

// As wide as the longest label needs.
const room = (_, labels) => Math.max(30, 12 + 6.4 * Math.max(0, ...(labels ?? []).map((label) => label.length)));
