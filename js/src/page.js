// The server's page: every pool of every kernel, as the stream tells it.

import { Card } from "./card.js";
import { attribute, element, text } from "./dom.js";
import { Stream } from "./stream.js";
import { Theme } from "./theme.js";
import "./page.css";

const EMPTY = "No kernel of yours has ranks now. A cell that begins with %%distributed starts some.";

class Page {
  constructor(place) {
    this._cards = new Map();
    new Theme(place);
    this._said = element("p", { class: "nbt-page-said", role: "status", "aria-live": "polite" });
    this._list = element("div", { class: "nbt-cards" });
    place.append(element("header", { class: "nbt-page-head" }, element("h1", {}, "nbtrain"), this._said), this._list);
    const heard = (message) => this.receive(message);
    this._stream = new Stream({ heard, state: (words, tone) => this.connected(words, tone) });
    this.connected("Connecting …", "busy");
  }

  receive({ kernel, about, message, gone }) {
    if (kernel === undefined) return;
    if (gone) {
      this._cards.get(kernel)?.close();
      this._cards.delete(kernel);
    } else {
      if (!this._cards.has(kernel)) this._add(kernel);
      if (about) this._tell(this._cards.get(kernel), about);
      if (message) this._cards.get(kernel).receive(message);
    }
    this._say();
  }

  // `words`: what is wrong with the connection; empty when nothing is.
  connected(words, tone) {
    this._trouble = words;
    attribute(this._said, "data-tone", words ? tone : null);
    // After a pause the server tells everything anew, but not what went while nobody listened.
    if (!words) for (const kernel of this._cards.keys()) this.receive({ kernel, gone: true });
    this._say();
  }

  _say() {
    text(this._said, this._trouble || (this._cards.size ? "" : EMPTY));
  }

  _add(kernel) {
    const card = new Card(kernel, () => this._stream.send({ again: kernel }));
    this._cards.set(kernel, card);
    this._list.append(card.node);
  }

  // Cards stand by the names of their notebooks, whoever answered first; none moves without need, for it may be in use.
  _tell(card, about) {
    const before = card.order;
    card.about(about);
    if (card.order === before) return;
    const others = [...this._cards.values()].filter((one) => one !== card && one.order > card.order);
    const next = others.sort((a, b) => (a.order < b.order ? -1 : 1))[0];
    this._list.insertBefore(card.node, next ? next.node : null);
  }
}

new Page(document.getElementById("nbtrain") ?? document.body);
