// Tabs as the keyboard expects them: arrows go from one to the next.

import { attribute, element } from "./dom.js";

let made = 0;

export class Tabs {
  // `pages`: name -> its node. `chosen()` is called when the user takes one.
  constructor(pages, chosen) {
    this._pages = pages;
    this._chosen = chosen;
    this._buttons = new Map();
    const prefix = `nbt-tab-${made++}-`;
    const list = element("div", { class: "nbt-tabs", role: "tablist", onkeydown: (event) => this._key(event) });
    for (const [name, page] of pages) {
      const id = prefix + name.toLowerCase();
      const tab = { type: "button", role: "tab", id, "aria-controls": `${id}-page`, onclick: () => this._choose(name) };
      const button = element("button", tab, name);
      const panel = { role: "tabpanel", id: `${id}-page`, "aria-labelledby": id };
      for (const [key, value] of Object.entries(panel)) attribute(page, key, value);
      this._buttons.set(name, button);
      list.append(button);
    }
    this.list = list;
    this.show([...pages.keys()][0]);
  }

  show(name) {
    this.shown = name;
    for (const [each, button] of this._buttons) {
      attribute(button, "aria-selected", String(each === name));
      attribute(button, "tabindex", each === name ? 0 : -1);
      this._pages.get(each).hidden = each !== name;
    }
  }

  _choose(name) {
    this.show(name);
    this._chosen();
  }

  _key(event) {
    const names = [...this._buttons.keys()];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = names[(names.indexOf(this.shown) + step + names.length) % names.length];
    this._choose(next);
    this._buttons.get(next).focus();
  }
}
