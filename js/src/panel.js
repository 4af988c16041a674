// One run, all of it: used by the widget in a notebook and by the server's page.

import { seconds, steps } from "./axis.js";
import { Board } from "./board.js";
import { Controls } from "./controls.js";
import { CurveSettings } from "./curve_settings.js";
import { CurveTools } from "./curve_tools.js";
import { element } from "./dom.js";
import { metric, percent, quantity, size, whole } from "./format.js";
import { Head } from "./head.js";
import { metricCharts } from "./metric_charts.js";
import { NAMES } from "./phases.js";
import { RankLegend } from "./rank_legend.js";
import { Split } from "./split.js";
import { charts } from "./store.js";
import { Table } from "./table.js";
import { Tabs } from "./tabs.js";
import { Theme } from "./theme.js";
import "./style.css";
import "./charts.css";

const NONE = new Map();
const LOOKS = {
  "speed/samples": { title: "samples per second", unit: "each rank", word: quantity, zero: true },
  "speed/steps": { title: "steps per second", word: quantity, zero: true },
  "compute/tflops": { title: "computing", unit: "TFLOP/s", word: quantity, zero: true },
  "compute/share": { title: "share of the device's peak", word: percent, zero: true },
  "memory/used": { title: "memory in use", word: size, zero: true },
  "memory/allocated": { title: "allocated by torch", word: size, zero: true },
  "memory/reserved": { title: "reserved by torch", word: size, zero: true },
  "memory/retries": { title: "times it had to make room", word: whole, zero: true },
};

// Of each page: the charts of the feed that it shows, and what it says when there are none, now and after the run.
const PAGES = {
  Metrics: [["metric"], "Nothing logged yet: log(loss=loss) in the loop draws a curve here.", "Nothing was logged."],
  Speed: [["speed", "compute"], "No step counted yet.", "No step was counted."],
  Memory: [["memory"], "Memory has not been measured yet.", "Memory was not measured."],
  Step: [["phases"], "Not known yet what a step is made of.", "It is not known what a step was made of."],
};

// What has a name of its own goes by it, what nbtrain measures by its chart as well.
const keyed = (chart, [name, curves]) => [name in NAMES || chart === "metric" ? name : `${chart}/${name}`, curves];

// What was heard last of the ranks no longer holds.
const still = (ranks, state) =>
  new Map([...ranks].map(([rank, row]) => [rank, { ...row, state, detail: "", tone: "quiet", rate: null }]));

export class Panel {
  // `named(run)`: see Controls.
  constructor(place, store, commands, { named } = {}) {
    this._store = store;
    this._tables = new Table();
    this._controls = new Controls(commands, { named, freeze: () => this.update() });
    this._head = new Head(this._controls);
    this.node = element("section", { class: "nbt-root", "aria-label": "training run" });
    place.append(this.node);
    this._theme = new Theme(this.node);
    this._axes = [steps(), seconds()];
    const [step, time] = this._axes;
    const settings = (this._settings = new CurveSettings());
    this._tools = new CurveTools(settings, store);
    const board = (axis, look, more) => new Board({ axis, theme: this._theme, settings, look, ...more });
    const metrics = { arrange: metricCharts, above: this._tools.node };
    this._pages = new Map([
      ["Metrics", board(step, () => ({ word: metric }), metrics)],
      ["Speed", board(time, (name) => LOOKS[name] ?? { word: quantity })],
      ["Memory", board(time, (name) => LOOKS[name] ?? { word: size })],
      ["Step", new Split({ axis: time, theme: this._theme })],
    ]);
    this._legend = new RankLegend(settings, this._theme);
    this._touched = false;
    const nodes = new Map([...this._pages].map(([name, page]) => [name, page.node]));
    this._tabs = new Tabs(nodes, () => {
      this._touched = true;
      this._open(); // also while the rest is frozen
    });
    const bar = element("div", { class: "nbt-tab-row" }, this._tabs.list, this._legend.node);
    this.node.append(...this._head.nodes, this._tables.node, bar, ...nodes.values());
    this._away = [store.subscribe(() => this.update())];
    this._clock = setInterval(() => this._head.update(store), 1000);
    this.update();
  }

  update() {
    const store = this._store;
    if (store.run?.id !== this._run) this._anew(store.run?.id);
    this._head.update(store);
    this._controls.update(store);
    if (this._controls.frozen) return;
    this._tables.update(store.lost ? still(store.ranks, store.lost.state) : store.ranks, store.run?.machines);
    // Where nothing is logged, the pace is what there is to see.
    if (!this._touched) this._tabs.show(this._shows(charts(store.series)));
    this._open();
  }

  // Draw what there is in the tab that is shown.
  _open() {
    const store = this._store;
    if (this._settings.over !== store.over) this._settings.change({ over: store.over });
    this._tools.update();
    this._page(charts(store.series), store.over);
    this._legend.update(this._tabs.shown === "Step" ? [] : [...store.ranks.keys()]);
  }

  close() {
    clearInterval(this._clock);
    for (const end of this._away) end();
    for (const page of this._pages.values()) page.close();
    this._legend.close();
    this._theme.close();
    this.node.remove();
  }

  // The next run of the same pool: what was looked at and said was the last one's.
  _anew(id) {
    this._run = id;
    for (const axis of this._axes) axis.zoom(null);
    this._controls.forget();
  }

  _shows(known) {
    return known.has("metric") || !known.has("speed") ? "Metrics" : "Speed";
  }

  _page(found, ended) {
    const name = this._tabs.shown;
    const [charts, now, afterwards] = PAGES[name];
    const shown = charts.flatMap((chart) => [...(found.get(chart) ?? NONE)].map((one) => keyed(chart, one)));
    this._pages.get(name).update(new Map(shown), ended ? afterwards : now);
  }
}
