// One chart: uPlot, redrawn at most once a frame, as wide as its box, with the words above it and beside the cursor.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { drawMarks } from "./bad_marks.js";
import { follow } from "./chart_gestures.js";
import { FullSize } from "./chart_full_size.js";
import { attribute, drawing, element, style, text } from "./dom.js";

const KEYS = "arrows move, + and - zoom, Escape shows all, Enter full size";

export class Chart {
  // `content` says what is drawn: see curves.js and layers.js. `copy()`: the values as text; null: they are not copied.
  constructor({ title, unit, axis, theme, content, copy = null }) {
    Object.assign(this, { axis, theme, content });
    this._legend = element("div", { class: "nbt-chart-legend" });
    this._note = element("div", { class: "nbt-tip", hidden: true });
    this._heard = element("div", { class: "nbt-hidden", role: "status" }); // what a key came to, for a screen reader
    this._box = element("div", { class: "nbt-plot", tabindex: 0, role: "group", "aria-description": KEYS }, this._note);
    attribute(this._box, "data-lm-suppress-shortcuts", "true"); // JupyterLab leaves its keys alone
    this._name = element("span", { class: "nbt-chart-name" });
    const button = (words, about, onclick) => element("button", { type: "button", ...about, onclick }, words);
    this._all = button("show all", { hidden: true, title: "Escape in the chart does the same" }, () => axis.zoom(null));
    this._copied = button("copy", { title: "copy the values as CSV" }, () => this._copy(copy));
    this._copied.hidden = !copy;
    const full = { "aria-label": "full size", title: "full size (double click)" };
    this._fullButton = button("⤢", full, () => this.fullSize.toggle());
    const buttons = element("span", { class: "nbt-chart-buttons" }, this._all, this._copied, this._fullButton);
    this._unit = unit ?? "";
    this._place = element("span", { class: "nbt-chart-place" }, this._unit);
    const head = element("div", { class: "nbt-chart-head" }, this._name, this._place, buttons);
    this.node = element("figure", { class: "nbt-chart", role: "group" }, head, this._legend, this._box, this._heard);
    this.rename(title);
    this.fullSize = new FullSize(this.node, this._box, (open) => this._opened(open));
    this._plot = null;
    this._shape = null; // of what the plot was made for
    this._size = [0, 0];
    this._due = 0;
    this._seen = true;
    this._away = [axis.subscribe(() => this.draw()), theme.subscribe(() => this.draw())];
    this._resize = new ResizeObserver(() => this._resized());
    this._resize.observe(this._box);
    const sighted = (entries) => {
      this._seen = entries[entries.length - 1].isIntersecting;
      if (this._seen) this.draw();
    };
    this._sight = new IntersectionObserver(sighted, { rootMargin: "300px" });
    this._sight.observe(this.node); // with its words: they are news, too
    follow(this._box, this);
  }

  rename(title) {
    text(this._name, title);
    attribute(this._name, "title", title);
    attribute(this.node, "aria-label", title);
    attribute(this._box, "aria-label", `curve of ${title}`);
  }

  // Soon: however much came in the meantime is drawn once.
  draw() {
    if (!this._due && this._seen) this._due = requestAnimationFrame(() => this._draw());
  }

  close() {
    this.fullSize.close();
    cancelAnimationFrame(this._due);
    for (const end of this._away) end();
    this._resize.disconnect();
    this._sight.disconnect();
    this._plot?.destroy();
    this.node.remove();
  }

  // What stands for it in the page: itself, or its dialog.
  get place() {
    return this.fullSize.dialog ?? this.node;
  }

  // ---------------------------------------------------------------- what gestures and keys do

  get plot() {
    return this._plot;
  }

  get part() {
    return this.axis.part ?? this.extent();
  }

  extent() {
    const [from, to] = this.content.extent();
    return to > from ? [from, to] : [from - 0.5, from + 0.5];
  }

  zoom(part) {
    part ? this.axis.zoom(...part) : this.axis.zoom(null);
  }

  // To a column of what is shown, or away.
  point(index) {
    const x = this._shown?.data[0][index];
    const left = x === undefined ? -10 : this._plot.valToPos(x, "x");
    this._plot?.setCursor({ left, top: left < 0 ? -10 : this._plot.over.clientHeight / 2 }, true, true);
    const rows = x === undefined ? [] : this.content.legend(index, this._shown);
    const words = rows.map(({ name, value }) => [name, value].filter(Boolean).join(" "));
    text(this._heard, rows.length ? [this.axis.word(x), ...words].join(", ") : "");
  }

  get shown() {
    return this._shown?.data[0] ?? [];
  }

  // ----------------------------------------------------------------

  _opened(open) {
    attribute(this._fullButton, "aria-label", open ? "back to the page" : "full size");
    text(this._fullButton, open ? "close" : "⤢");
    this._resized();
  }

  async _copy(copy) {
    const said = (await toClipboard(copy(), this.node)) ? "copied" : "not allowed here";
    text(this._copied, said);
    setTimeout(() => text(this._copied, "copy"), 1500);
  }

  _resized() {
    const size = this._measured();
    if (!size[0] || String(size) === String(this._size)) return;
    this._size = size;
    style(this._box, { "--nbt-plot-height": `${size[1]}px` });
    this._plot?.setSize({ width: size[0], height: size[1] });
    this.draw();
  }

  // A wide chart is higher, too.
  _measured() {
    const width = Math.floor(this._box.clientWidth);
    if (this.fullSize.open) return [width, Math.max(160, Math.floor(this._box.clientHeight))];
    return [width, Math.round(Math.min(240, Math.max(140, 0.26 * width)))];
  }

  _draw() {
    this._due = 0;
    if (!this._size[0]) return;
    const [from, to] = this.part;
    this._all.hidden = !this.axis.part;
    this._from = from;
    this._to = to;
    this._shown = this.content.data(from, to, this._size[0]);
    if (this.content.shape !== this._shape) {
      this._shape = this.content.shape;
      this._plot?.destroy();
      this._plot = this._make();
    } else {
      this._plot.setData(this._shown.data);
    }
    this._tell();
  }

  _make() {
    const { axis, theme, content } = this;
    const line = { stroke: () => theme.soft, grid: { stroke: () => theme.grid, width: 1 }, ticks: { show: false } };
    const font = "11px system-ui, sans-serif";
    const labels = (_, at) => at.map((y) => (y === null ? "" : content.tick(y, at)));
    const own = (plot, _, low, high) => content.splits(low, high, Math.max(2, Math.floor(plot.height / 26)));
    const options = {
      width: this._size[0],
      height: this._size[1],
      padding: [8, 18, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: () => [this._from, this._to] },
        y: { distr: content.log ? 3 : 1, range: (_, low, high) => content.range(low, high) },
      },
      axes: [
        { ...line, font, size: 22, gap: 3, space: 48, incrs: axis.steps, values: (_, at) => at.map(axis.tick) },
        { ...line, font, size: room, gap: 4, space: 20, values: labels, ...(content.log && { splits: own, filter }) },
      ],
      series: [{}, ...content.series()],
      bands: content.bands(),
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        sync: { key: axis.key, scales: ["x", null], filters: { pub: moved, sub: moved } },
        bind: { dblclick: () => () => this.fullSize.toggle() },
      },
      hooks: {
        setCursor: [() => this._tell()],
        setSelect: [(plot) => this._select(plot)],
        draw: [(plot) => drawMarks(plot, this._shown, this._box)],
      },
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
    const { left, idx } = plot.cursor;
    const at = left >= 0 && idx !== null && idx !== undefined ? idx : null;
    const place = at === null ? "" : this.axis.word(this._shown.data[0][at]);
    text(this._place, place || this._unit);
    this._say(this.content.legend(at, this._shown));
    this._note.hidden = at === null || !(plot.over.matches(":hover") || this._box.matches(":focus-visible"));
    if (this._note.hidden) return;
    const rows = this.content.rows(at, this._shown).map((row) => entry(row, "nbt-tip-row", "b"));
    this._note.replaceChildren(element("div", { class: "nbt-tip-place" }, place), ...rows);
    this._pin(plot, left);
  }

  // The words above the plot. Only what differs is touched.
  _say(rows) {
    const state = JSON.stringify(rows);
    if (state === this._said) return;
    this._said = state;
    this._legend.replaceChildren(...rows.map((row) => entry(row, "nbt-chart-value", "span")));
  }

  // In a corner: on the side where the cursor is not, above or below, where the curve is not.
  _pin(plot, left) {
    const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = plot.over;
    const right = left < offsetWidth / 2;
    const [x, y] = [this._shown.data[0], this.content.main()];
    const heights = x.flatMap((_, i) => {
      const there = plot.valToPos(x[i], "x") > offsetWidth / 2 === right;
      return there && y[i] > -Infinity ? [plot.valToPos(y[i], "y")] : [];
    });
    const high = heights.reduce((sum, one) => sum + one, 0) < (heights.length * offsetHeight) / 2;
    const [beyond, below] = [
      this._box.clientWidth - offsetLeft - offsetWidth,
      this._box.clientHeight - offsetTop - offsetHeight,
    ];
    style(this._note, {
      left: right ? "auto" : `${offsetLeft + 4}px`,
      right: right ? `${beyond + 4}px` : "auto",
      top: high ? "auto" : `${offsetTop + 2}px`,
      bottom: high ? `${below + 2}px` : "auto",
      "max-height": `${offsetHeight - 4}px`,
    });
  }
}

// A line of a legend or beside the cursor: a sample of the line, a name, a value.
function entry({ colour, dash, name, value, tone, soft }, kind, tag) {
  const made = element("span", { class: kind, "data-soft": soft });
  if (colour) made.append(sample(colour, dash));
  if (name) made.append(element("span", { class: "nbt-name" }, name));
  const said = element(tag, {}, value);
  if (tone) attribute(said, "data-tone", tone);
  made.append(said);
  return made;
}

export function sample(colour, dash = []) {
  const width = dash.length ? 26 : 14; // a dash needs room to be seen
  const picture = drawing("svg", { width, height: 8, "aria-hidden": "true" });
  const look = { stroke: colour, "stroke-width": 2, "stroke-dasharray": dash.join(" ") };
  picture.append(drawing("line", { x1: 0, x2: width, y1: 4, y2: 4, ...look }));
  return picture;
}

// A page that is not served safely has no clipboard of its own.
async function toClipboard(words, place) {
  try {
    await navigator.clipboard.writeText(words);
    return true;
  } catch {
    const area = element("textarea", { class: "nbt-hidden", "aria-hidden": "true" });
    area.value = words;
    place.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// Only moves are shared: what is dragged in one chart zooms all through the axis.
const moved = (type) => type === "mousemove" || type === "mouseleave";

const filter = (_, splits) => splits;

// As wide as the longest label needs.
const room = (_, labels) => Math.max(30, 12 + 6.4 * Math.max(0, ...(labels ?? []).map((label) => label.length)));
