// Strategies as cards: what each is, what it needs of the memory that is here, or why it cannot be used. The few that
// suit the goal are shown, the others behind a button.

import { attribute, element, style, text } from "./dom.js";
import { size } from "./format.js";
import { reach, share } from "./picker_reach.js";

const PARTS = ["parameters", "gradients", "optimizer", "activations", "buffers"];
let made = 0;

export class Cards {
  constructor(ask) {
    this._ask = ask;
    this._cards = new Map();
    this._group = `nbt-pick-card-${made++}`;
    this._list = element("div", { class: "nbt-pick-cards", role: "radiogroup", "aria-label": "strategies" });
    const keys = PARTS.map((part) => element("span", { class: "nbt-pick-key" }, element("i", { class: part }), part));
    this._room = element("span", { class: "nbt-pick-key" }, element("b"), "limit of a rank");
    this._legend = element("div", { class: "nbt-pick-legend" }, ...keys, this._room);
    this._all = false; // the others are shown, too
    const more = { type: "button", class: "nbt-pick-more", "aria-expanded": "false", onclick: () => this._more() };
    this._button = element("button", more);
    this.node = element("div", {}, this._list, this._button, this._legend);
    this._ticks = null; // what the user has ticked; until then, what is worth measuring
  }

  get ticked() {
    return [...this._cards.values()].filter((card) => card.ticked).map((card) => card.variant);
  }

  update(data) {
    const shown = data.cards.map((card) => card.shown);
    for (const card of data.cards) {
      if (!this._cards.has(card.name)) this._cards.set(card.name, new Card(this._group, this._ask, () => this._tick()));
      this._cards.get(card.name).update(card, card.shown.memory ? reach(card.shown, shown) : 0);
    }
    for (const name of [...this._cards.keys()]) {
      if (data.cards.some((card) => card.name === name)) continue;
      this._cards.get(name).node.remove();
      this._cards.delete(name);
    }
    if (!this._ticks) for (const card of this._cards.values()) card.ticked = data.worth.includes(card.variant);
    const nodes = data.cards.map((card) => this._cards.get(card.name).node);
    if (nodes.some((node, at) => this._list.children[at] !== node)) this._list.replaceChildren(...nodes);
    this._data = data;
    this._fold();
    this._legend.hidden = !shown.some((one) => one.memory);
    this._room.hidden = ![...this._cards.values()].some((card) => card.shows);
  }

  _more() {
    this._all = !this._all;
    this._fold();
  }

  // What is chosen is shown in any case.
  _fold() {
    const others = this._data.cards.filter((card) => !card.first && !card.chosen);
    for (const card of this._data.cards) this._cards.get(card.name).node.hidden = !this._all && others.includes(card);
    this._button.hidden = !others.length;
    attribute(this._button, "aria-expanded", String(this._all));
    text(this._button, this._all ? "Fewer strategies" : `More strategies (${others.length})`);
  }

  _tick() {
    this._ticks = true;
    this._ask({ kind: "tick" });
  }
}

class Card {
  constructor(group, ask, ticked) {
    const id = `${group}-${made++}`;
    this._radio = element("input", { type: "radio", name: group, id, "aria-describedby": `${id}-about` });
    this._radio.addEventListener("change", () => ask({ kind: "take", line: this._line }));
    this._name = element("label", { for: id, class: "nbt-code" });
    this._star = element("span", { class: "nbt-pick-star", title: "recommended", hidden: true }, "★ recommended");
    this._box = element("input", { type: "checkbox", onchange: ticked });
    this._tick = element("label", { class: "nbt-pick-tick nbt-soft" }, this._box, "measure");
    this._bar = element("div", { class: "nbt-pick-bar", role: "img" }, ...PARTS.map((part) => element("i", { class: part })));
    this._room = element("b");
    this._bar.append(this._room);
    this._needs = element("div", { class: "nbt-pick-needs" });
    this._about = element("div", { class: "nbt-pick-about nbt-soft", id: `${id}-about` });
    const head = element("div", { class: "nbt-pick-card-head" }, this._radio, this._name, this._star, this._tick);
    this.node = element("div", { class: "nbt-pick-card" }, head, this._bar, this._needs, this._about);
    // The whole card is to be clicked, but for what is a button of its own.
    this.node.addEventListener("click", (event) => {
      if (event.target.closest("label, input") || this._radio.disabled) return;
      this._radio.focus({ preventScroll: true });
      this._radio.click();
    });
  }

  get ticked() {
    return this._box.checked && !this._box.disabled;
  }

  set ticked(on) {
    this._box.checked = on && !this._box.disabled;
  }

  update(card, scale) {
    const { shown } = card;
    this._line = shown.line;
    this.variant = shown.name;
    const usable = !card.reason;
    text(this._name, usable ? shown.name : card.name);
    text(this._about, card.reason || card.summary);
    this._radio.checked = card.chosen;
    this._radio.disabled = !usable;
    this._box.disabled = !usable || Boolean(shown.reason);
    this._tick.hidden = !usable;
    this._star.hidden = !shown.recommended;
    this.node.classList.toggle("nbt-chosen", card.chosen);
    this.node.classList.toggle("nbt-unusable", !usable);
    this._memory(usable ? shown : {}, scale);
  }

  _memory({ memory, room, fits, tight, note }, scale) {
    this._bar.hidden = !memory;
    this.shows = false;
    const words = memory ? needs(memory, room, fits, tight) : (note ?? "");
    text(this._needs, words);
    attribute(this._needs, "data-tone", fits === false ? "bad" : tight ? "wait" : null);
    attribute(this._needs, "title", memory && note ? note : null);
    if (!memory) return;
    // Not all parts are there at once, and the step takes some for a moment: they are drawn as shares of the peak.
    const sum = PARTS.reduce((total, part) => total + memory[part], 0) || 1;
    const width = (bytes) => `${(100 * bytes) / scale}%`;
    PARTS.forEach((part, at) => style(this._bar.children[at], { width: width((memory[part] * memory.peak) / sum) }));
    this.shows = Boolean(room) && room < memory.peak; // the mark
    this._room.hidden = !this.shows;
    style(this._room, { left: width(room) });
    const told = PARTS.filter((part) => memory[part]).map((part) => `${part} ${size(memory[part])}`);
    attribute(this._bar, "aria-label", told.join(", "));
    attribute(this._bar, "title", told.join("\n"));
  }
}

// 310 MB of 7.7 GB, 5 % · sends 12 MB a step
function needs(memory, room, fits, tight) {
  const of = room ? `, ${share(memory.peak, room)}` : "";
  const words = [room != null ? `${size(memory.peak)} of ${size(room)}${of}` : size(memory.peak)];
  if (fits === false) words.push("does not fit");
  else if (tight) words.push("close");
  if (memory.sent) words.push(`sends ${size(memory.sent)} a step`);
  return words.join(" · ");
}
