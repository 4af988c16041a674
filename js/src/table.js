// One row per rank: what it does, how fast, how much memory, what it printed last.

import { attribute, element, style, text } from "./dom.js";
import { percent, quantity, size, whole } from "./format.js";

export const GLYPHS = { quiet: "○", busy: "▸", wait: "◔", good: "✓", bad: "✕" };
const FULL = 0.92; // of its limit: from here on memory is short
const COLUMNS = [
  ["rank", "n"],
  ["state", "state"],
  ["device", "device"],
  ["step", "n step"],
  ["samples/s", "n rate"],
  ["memory", "memory"],
  ["use", "n use"],
  ["last printed", "line"],
];

export class Table {
  constructor() {
    const heads = COLUMNS.map(([name, kind]) => element("th", { scope: "col", class: classes(kind) }, name));
    this._body = element("tbody");
    const table = element(
      "table",
      { "aria-label": "ranks" },
      element("thead", {}, element("tr", {}, ...heads)),
      this._body,
    );
    this.node = element("div", { class: "nbt-table", tabindex: 0, role: "region", "aria-label": "ranks" }, table);
    this._rows = new Map();
  }

  // `ranks`: rank -> its row, as the feed has it.
  update(ranks) {
    for (const [rank, row] of this._rows) {
      if (!ranks.has(rank)) {
        row.node.remove();
        this._rows.delete(rank);
      }
    }
    for (const rank of [...ranks.keys()].sort((a, b) => a - b)) {
      if (!this._rows.has(rank)) this._rows.set(rank, new Row(rank));
      const row = this._rows.get(rank);
      row.update(ranks.get(rank));
      if (row.node.parentNode !== this._body) this._place(row);
    }
    this.node.hidden = !ranks.size;
  }

  _place(row) {
    const after = [...this._body.children].find((node) => Number(node.dataset.rank) > row.rank);
    this._body.insertBefore(row.node, after ?? null);
  }
}

class Row {
  constructor(rank) {
    this.rank = rank;
    this._glyph = element("i", { class: "nbt-glyph", "aria-hidden": "true" });
    this._word = element("span");
    this._memory = new Memory();
    const state = element("span", { class: "nbt-state-words" }, this._glyph, this._word);
    const contents = [String(rank), state, "", "", "", this._memory.node, "", ""];
    this._cells = COLUMNS.map(([, kind], i) => element("td", { class: classes(kind) }, contents[i]));
    this.node = element("tr", { "data-rank": rank }, ...this._cells);
  }

  update(row) {
    const [, state, device, step, rate, , use, line] = this._cells;
    const words = [row.state, row.detail].filter(Boolean).join(": ");
    text(this._glyph, GLYPHS[row.tone] ?? GLYPHS.quiet);
    text(this._word, words);
    attribute(state, "title", words);
    attribute(state, "data-tone", row.tone);
    text(device, row.device ?? "");
    text(step, whole(row.step ?? 0));
    text(rate, Number.isFinite(row.rate) ? quantity(row.rate) : "–");
    this._memory.update(row);
    text(use, used(row));
    text(line, row.line ?? "");
    attribute(line, "title", row.line || null);
  }
}

// Now, the peak as a mark, and the limit as the whole bar; words alone where no limit is known.
class Memory {
  constructor() {
    this._now = element("i");
    this._peak = element("b");
    this._words = element("span");
    this._bar = element("span", { class: "nbt-bar", "aria-hidden": "true" }, this._now, this._peak);
    this.node = element("span", { class: "nbt-memory-bar" }, this._bar, this._words);
  }

  update({ memory, peak, limit, process, allocated, reserved, retries }) {
    const known = Number.isFinite(memory);
    this.node.hidden = !known;
    if (!known) return;
    const most = Math.max(peak || 0, memory);
    const short = limit > 0 && memory >= FULL * limit;
    const at = (bytes) => `${(100 * Math.min(1, bytes / limit)).toFixed(1)}%`;
    this._bar.hidden = !limit;
    if (limit) style(this._now, { width: at(memory) });
    if (limit) style(this._peak, { left: `max(2px, calc(${at(most)} - 2px))` });
    this._peak.hidden = most <= memory;
    attribute(this.node, "data-tone", short || retries ? "bad" : null);
    const words = [amount(memory, most, limit), short ? "nearly full" : "", retried(retries)];
    text(this._words, words.filter(Boolean).join(" · "));
    const rest = { "of the process": process, "allocated by torch": allocated, "reserved by torch": reserved };
    const more = Object.entries(rest).filter(([, bytes]) => bytes > 0);
    attribute(this.node, "title", more.map(([name, bytes]) => `${size(bytes)} ${name}`).join("\n") || null);
  }
}

// 1.2 GB, peak 1.9 GB of 16 GB
function amount(memory, peak, limit) {
  const words = [size(memory)];
  if (peak > memory && size(peak) !== words[0]) words.push(`peak ${size(peak)}`);
  return words.join(", ") + (limit ? ` of ${size(limit)}` : "");
}

const retried = (times) => (times ? `had to make room ${whole(times)} ×` : "");

function used({ use, card }) {
  if (Number.isFinite(card)) return `GPU ${percent(card)}`;
  return Number.isFinite(use) ? `${use.toFixed(1)} cores` : "–";
}

const classes = (kind) =>
  kind
    .split(" ")
    .map((one) => `nbt-${one}`)
    .join(" ");
