// One line per rank: what it does, how fast, how much memory, what it printed last; and all of them together.

import { attribute, element, style, text } from "./dom.js";
import { percent, quantity, size, whole } from "./format.js";
import { scale, totals } from "./totals.js";

export const GLYPHS = { quiet: "○", busy: "▸", wait: "◔", good: "✓", bad: "✕" };
const FULL = 0.92; // of its limit: from here on memory is short
const COLUMNS = [
  ["rank", "n rank"],
  ["state", "state"],
  ["device", "device"],
  ["step", "n step"],
  ["samples/s", "n rate"],
  ["memory", "memory"],
  ["peak", "n peak"],
  ["allocated", "n allocated"],
  ["use", "n use"],
  ["last printed", "line"],
];

export class Table {
  constructor() {
    this._heads = new Map(
      COLUMNS.map(([name, kind]) => [name, element("th", { scope: "col", class: classes(kind) }, name)]),
    );
    this._body = element("tbody");
    this._all = new Totals();
    this._table = element(
      "table",
      { "aria-label": "ranks" },
      element("thead", {}, element("tr", {}, ...this._heads.values())),
      this._body,
      element("tfoot", {}, this._all.node),
    );
    this.node = element("div", { class: "nbt-table", tabindex: 0, role: "region", "aria-label": "ranks" }, this._table);
    this._rows = new Map();
  }

  // `ranks`: rank -> its row, as the feed has it.
  update(ranks, machines) {
    for (const [rank, row] of this._rows) {
      if (!ranks.has(rank)) {
        row.node.remove();
        this._rows.delete(rank);
      }
    }
    const inOrder = [...ranks.keys()].sort((a, b) => a - b);
    const found = scale([...ranks.values()]);
    for (const rank of inOrder) {
      if (!this._rows.has(rank)) this._rows.set(rank, new Row(rank));
      const row = this._rows.get(rank);
      row.update(ranks.get(rank), found);
      if (row.node.parentNode !== this._body) this._place(row);
    }
    this._all.update(totals(inOrder.map((rank) => ranks.get(rank)), machines));
    const cards = [...ranks.values()].some((row) => row.reserved);
    this._table.classList.toggle("nbt-on-cpu", !cards);
    text(this._heads.get("use"), cards ? "GPU" : "cores");
    attribute(this._heads.get("memory"), "title", SCALES[found.of]);
    this.node.hidden = !ranks.size;
  }

  _place(row) {
    const after = [...this._body.children].find((node) => Number(node.dataset.rank) > row.rank);
    this._body.insertBefore(row.node, after ?? null);
  }
}

const SCALES = {
  limit: "The whole bar is what a rank may have.",
  largest: "The whole bar is the most that any rank had: all are far from what the machine has.",
};

class Row {
  constructor(rank) {
    this.rank = rank;
    this._glyph = element("i", { class: "nbt-glyph", "aria-hidden": "true" });
    this._word = element("span");
    this._memory = new Memory();
    const state = element("span", { class: "nbt-state-words" }, this._glyph, this._word);
    const contents = { rank: String(rank), state, memory: this._memory.node };
    this._cells = new Map(COLUMNS.map(([name, kind]) => [name, cell(kind, contents[name])]));
    this.node = element("tr", { "data-rank": rank }, ...this._cells.values());
  }

  update(row, found) {
    const words = [row.state, row.detail].filter(Boolean).join(": ");
    const state = this._cells.get("state");
    text(this._glyph, GLYPHS[row.tone] ?? GLYPHS.quiet);
    text(this._word, words);
    attribute(state, "title", words);
    attribute(state, "data-tone", row.tone);
    this._memory.update(row, found);
    const line = this._cells.get("last printed");
    attribute(line, "title", row.line || null);
    const said = {
      device: row.device ?? "",
      step: whole(row.step ?? 0),
      "samples/s": Number.isFinite(row.rate) ? quantity(row.rate) : "–",
      peak: row.peak ? size(row.peak) : "–",
      allocated: row.reserved ? percent(row.allocated / row.reserved) : "–",
      use: used(row),
      "last printed": row.line ?? "",
    };
    for (const [name, value] of Object.entries(said)) text(this._cells.get(name), value);
  }
}

// Now, of it what torch has given out, and the peak as a mark.
class Memory {
  constructor() {
    this._now = element("i");
    this._given = element("i", { class: "nbt-given" });
    this._peak = element("b");
    this._words = element("span");
    this._bar = element("span", { class: "nbt-bar", "aria-hidden": "true" }, this._now, this._given, this._peak);
    this.node = element("span", { class: "nbt-memory-bar" }, this._bar, this._words);
  }

  update({ memory, peak, limit, process, allocated, reserved, retries }, { whole: most }) {
    const known = Number.isFinite(memory);
    this.node.hidden = !known;
    if (!known) return;
    const full = most || limit;
    const highest = Math.max(peak || 0, memory);
    const short = limit > 0 && memory >= FULL * limit;
    const at = (bytes) => `${(100 * Math.min(1, bytes / full)).toFixed(1)}%`;
    this._bar.hidden = !full;
    if (full) {
      style(this._now, { width: at(memory) });
      style(this._given, { width: at(allocated || 0) });
      style(this._peak, { left: `max(2px, calc(${at(highest)} - 2px))` });
    }
    this._given.hidden = !allocated;
    this._bar.classList.toggle("nbt-shared", allocated > 0);
    this._peak.hidden = highest <= memory;
    attribute(this.node, "data-tone", short || retries ? "bad" : null);
    const words = [size(memory), short ? "nearly full" : "", retried(retries)];
    text(this._words, words.filter(Boolean).join(" · "));
    const rest = {
      "at most so far": highest,
      "of the process": process,
      "allocated by torch": allocated,
      "reserved by torch": reserved,
    };
    const more = Object.entries(rest).filter(([, bytes]) => bytes > 0);
    const said = more.map(([name, bytes]) => `${size(bytes)} ${name}`);
    if (limit) said.unshift(`${size(memory)} of ${size(limit)} (${percent(memory / limit)})`);
    attribute(this.node, "title", said.join("\n") || null);
  }
}

// The last line: all ranks together, beside what the machine has.
class Totals {
  constructor() {
    this._cells = new Map(COLUMNS.map(([name, kind]) => [name, cell(kind, name === "rank" ? "all" : "")]));
    this.node = element("tr", { class: "nbt-all" }, ...this._cells.values());
  }

  update(all) {
    this.node.hidden = !all;
    if (!all) return;
    const { rate, memory, limit, use, card } = all;
    const said = {
      "samples/s": rate === null ? "–" : quantity(rate),
      memory: memory === null ? "" : limit ? `${size(memory)} of ${size(limit)}` : size(memory),
      use: used({ use, card }),
    };
    for (const [name, value] of Object.entries(said)) text(this._cells.get(name), value);
  }
}

const retried = (times) => (times ? `${whole(times)} allocation ${times === 1 ? "retry" : "retries"}` : "");

function used({ use, card }) {
  if (Number.isFinite(card)) return percent(card);
  return Number.isFinite(use) ? use.toFixed(1) : "–";
}

const cell = (kind, ...content) => element("td", { class: classes(kind) }, ...content.filter(Boolean));

const classes = (kind) =>
  kind
    .split(" ")
    .map((one) => `nbt-${one}`)
    .join(" ");
