// The options of the strategy that was taken, and its presets.

import { attribute, element, text } from "./dom.js";
import { size } from "./format.js";
import { Field } from "./picker_field.js";

export class Options {
  constructor(ask) {
    this._ask = ask;
    this._fields = new Map();
    this._title = element("strong", { class: "nbt-code" });
    this._presets = element("div", { class: "nbt-pick-presets", role: "group", "aria-label": "presets" });
    this._inputs = element("div", { class: "nbt-pick-inputs" });
    this._none = element("span", { class: "nbt-soft" }, "No options.");
    const head = element("div", { class: "nbt-pick-options-head" }, this._title, this._none, this._presets);
    this.node = element("section", { class: "nbt-pick-options", "aria-label": "options" }, head, this._inputs);
  }

  update(data, waits) {
    const card = data.cards.find((one) => one.chosen);
    text(this._title, card?.name ?? data.strategy);
    this._offer(card?.variants ?? []);
    const wanted = data.strategy + data.options.map(({ field, kind }) => `${field} ${kind}`).join();
    if (wanted !== this._wanted) this._make(data.options, wanted);
    this._none.hidden = data.options.length > 0;
    for (const one of data.options) {
      const field = this._fields.get(one.field);
      field.update(one, waits);
      field.node.classList.toggle("nbt-given", one.value !== one.usual);
    }
  }

  close() {
    for (const field of this._fields.values()) field.close();
  }

  _make(options, wanted) {
    this.close();
    this._wanted = wanted;
    const field = ({ field, flag, kind, help }) => {
      const changed = (value) => this._ask({ kind: "option", name: field, value });
      return new Field({ kind, label: flag.slice(2), help, changed });
    };
    this._fields = new Map(options.map((one) => [one.field, field(one)]));
    this._inputs.replaceChildren(...[...this._fields.values()].map((one) => one.node));
  }

  _offer(variants) {
    const state = JSON.stringify(variants);
    if (state === this._offered) return;
    this._offered = state;
    const focused = [...this._presets.children].findIndex((node) => node.matches(":focus"));
    this._presets.replaceChildren(...(variants.length > 1 ? variants.map((one) => this._preset(one)) : []));
    this._presets.children[focused]?.focus();
  }

  _preset({ name, line, stands, chosen, recommended, memory, fits, reason }) {
    const title = reason || stands;
    const button = element("button", { type: "button", title, onclick: () => this._ask({ kind: "take", line }) });
    button.append(element("span", {}, recommended ? `★ ${name}` : name));
    if (memory) button.append(element("small", {}, size(memory.peak)));
    attribute(button, "aria-pressed", String(chosen));
    attribute(button, "data-tone", fits === false ? "bad" : null);
    button.disabled = Boolean(reason);
    return button;
  }
}
