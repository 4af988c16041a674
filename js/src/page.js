// The server's page: every pool of every kernel, as the stream tells it, and the last runs of each notebook.

import { base, Card, totals } from "./card.js";
import { attribute, element, text } from "./dom.js";
import { earlier } from "./earlier.js";
import { server } from "./jupyter.js";
import { ServerList } from "./server_list.js";
import { Stream } from "./stream.js";
import { Theme } from "./theme.js";
import "./page.css";

const EMPTY = "No kernel of yours has ranks now. A cell that begins with %%distributed starts some.";
const SOON = 300; // milliseconds: what changes together is asked for once

class Page {
  constructor(place) {
    this._cards = new Map();
    this._asking = 0;
    new Theme(place);
    this._said = element("p", { class: "nbt-page-said", role: "status", "aria-live": "polite" });
    this._totals = element("p", { class: "nbt-page-said nbt-soft" });
    this._list = element("div", { class: "nbt-cards" });
    this._others = element("section", { class: "nbt-others nbt-root", "aria-label": "notebooks without ranks" });
    const head = element("header", { class: "nbt-page-head" }, element("h1", {}, "nbtrain"), this._totals, this._said);
    place.append(head, this._list, this._others);
    this._sessions = new ServerList("api/sessions", () => this._link());
    this._notebooks = new ServerList("nbtrain/api/runs", () => this._recall());
    const heard = (message) => this.receive(message);
    this._stream = new Stream({ heard, state: (words, tone) => this.connected(words, tone) });
    this.connected("Connecting …", "busy");
  }

  receive({ kernel, about, message, gone }) {
    if (kernel === undefined) return;
    const news = gone || !this._cards.has(kernel) || ["all", "end"].includes(message?.kind);
    if (gone) {
      this._cards.get(kernel)?.close();
      this._cards.delete(kernel);
    } else {
      if (!this._cards.has(kernel)) this._add(kernel);
      if (about) this._tell(this._cards.get(kernel), about);
      if (message) this._cards.get(kernel).receive(message);
    }
    this._say();
    if (news) this._askSoon();
  }

  // `words`: what is wrong with the connection; empty when nothing is.
  connected(words, tone) {
    this._trouble = words;
    attribute(this._said, "data-tone", words ? tone : null);
    // After a pause the server tells everything anew, but not what went while nobody listened.
    if (!words) for (const kernel of this._cards.keys()) this.receive({ kernel, gone: true });
    this._say();
    if (!words) this._askSoon();
  }

  _say() {
    const cards = [...this._cards.values()];
    text(this._said, this._trouble || (cards.length ? "" : EMPTY));
    const many = `${cards.length} ${cards.length === 1 ? "notebook" : "notebooks"}`;
    text(this._totals, cards.length && !this._trouble ? `${many} · ${totals(cards)}` : "");
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

  _askSoon() {
    clearTimeout(this._asking);
    this._asking = setTimeout(() => [this._sessions, this._notebooks].forEach((list) => list.ask()), SOON);
  }

  // Where the notebooks are.
  _link() {
    for (const card of this._cards.values()) {
      const open = ({ kernel, type }) => kernel?.id === card.kernel && type === "notebook";
      card.opens(address(this._sessions.items.find(open)?.path));
    }
  }

  // What they ran before.
  _recall() {
    const notebooks = this._notebooks.items;
    const shown = new Set();
    for (const card of this._cards.values()) {
      const before = notebooks.find((one) => card.notebook && one.notebook === card.notebook);
      fill(card.earlier, before && earlier(before.runs));
      if (before) shown.add(before.notebook);
    }
    const others = notebooks.filter((one) => !shown.has(one.notebook));
    this._others.hidden = !others.length;
    this._others.replaceChildren(
      element("h2", {}, "Notebooks without ranks"),
      ...others.map(({ notebook, path, runs }) => {
        const link = element("a", { href: address(path) || null, title: notebook }, base(notebook));
        return element("div", { class: "nbt-other" }, link, earlier(runs));
      }),
    );
  }
}

// Where the server opens a notebook; empty where it does not show it.
function address(path) {
  const behind = server();
  return behind && path ? behind.base + behind.opens + path.split("/").map(encodeURIComponent).join("/") : "";
}

// What is open stays open.
function fill(node, content) {
  const open = node.querySelector("details")?.open ?? false;
  node.replaceChildren(...(content ? [content] : []));
  if (content) content.open = open;
}

new Page(document.getElementById("nbtrain") ?? document.body);
