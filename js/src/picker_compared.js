// What was measured: a table and a picture, while it goes on and when it is over.

import { attribute, element, text } from "./dom.js";

export class Compared {
  constructor(ask) {
    this._ask = ask;
    this._title = element("p", { class: "nbt-soft" });
    this._head = element("tr");
    this._body = element("tbody");
    this._verdict = element("p", { class: "nbt-pick-verdict", role: "status" });
    this._picture = element("img", { alt: "memory and speed of each", class: "nbt-pick-picture" });
    this.node = element(
      "section",
      { class: "nbt-pick-compared", "aria-label": "measured", hidden: true },
      this._title,
      element("div", { class: "nbt-table" }, element("table", {}, element("thead", {}, this._head), this._body)),
      this._verdict,
      this._picture,
    );
  }

  update(compared) {
    this.node.hidden = !compared;
    const state = JSON.stringify(compared);
    if (!compared || state === this._state) return;
    this._state = state;
    text(this._title, compared.title);
    const [head, ...rows] = compared.table;
    this._head.replaceChildren(...[...head, ""].map((name) => element("th", { scope: "col" }, name)));
    this._body.replaceChildren(...rows.map((cells, at) => this._row(cells, compared.rows[at])));
    text(this._verdict, compared.use);
    this._svg = compared.picture;
    this.look();
  }

  // An image knows nothing of the page around it: it is told what letters look like here.
  look() {
    this._picture.hidden = !this._svg;
    if (!this._svg) return;
    const ink = getComputedStyle(this.node).color;
    const drawn = this._svg.replace(/color:var\([^)]*\)/, `color:${ink}`);
    attribute(this._picture, "src", `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawn)}`);
  }

  _row(cells, { line, state, best }) {
    const take = { type: "button", title: line, onclick: () => this._ask({ kind: "take", line }) };
    const tone = { failed: "bad", running: "busy" }[state] ?? null;
    return element(
      "tr",
      { "data-tone": tone, class: best ? "nbt-best" : null },
      ...cells.map((cell, at) => element("td", { class: at ? null : "nbt-code" }, cell)),
      element("td", {}, state === "done" ? element("button", take, "Select") : ""),
    );
  }
}
