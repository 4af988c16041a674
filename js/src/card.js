// One pool on the server's page: whose it is, what its ranks hold, and the run it has or had last.

import { Commands } from "./commands.js";
import { attribute, element, text } from "./dom.js";
import { size } from "./format.js";
import { Panel } from "./panel.js";
import { Store } from "./store.js";
import { GLYPHS } from "./table.js";

const TONES = { running: "busy", starting: "wait", idle: "quiet" };

export class Card {
  constructor(kernel, ask) {
    this._store = new Store(ask);
    this._commands = new Commands(this._store);
    this._panel = null;
    this._name = element("h2");
    this._state = element("span", { class: "nbt-run-state" });
    this._more = element("span", { class: "nbt-soft" });
    this._ranks = element("ul", { class: "nbt-pool" });
    this._place = element("div");
    this.order = `~ ${kernel}`;
    const head = element("div", { class: "nbt-card-head" }, this._name, this._state, this._more);
    this.node = element("article", { class: "nbt-card nbt-root" }, head, this._ranks, this._place);
    text(this._name, `kernel ${kernel.slice(0, 8)}`);
  }

  about({ kernel, pid, notebook, engine, ranks, state, run }) {
    const short = `kernel ${kernel.slice(0, 8)}`;
    this.order = `${notebook || "~"} ${kernel}`; // those without a name last
    text(this._name, notebook ? notebook.split("/").pop() : short);
    attribute(this._name, "title", notebook || kernel);
    text(this._state, `${GLYPHS[TONES[state] ?? "quiet"]} ${state}`);
    attribute(this._state, "data-tone", TONES[state] ?? "quiet");
    const held = ranks.reduce((sum, one) => sum + (one.memory || 0), 0);
    const many = `${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"}`;
    const words = [notebook ? short : "", `pid ${pid}`, engine, many, held ? `${size(held)} in all` : ""];
    text(this._more, words.filter(Boolean).join(" · "));
    // While a run goes on its own table says it, and more.
    this._ranks.hidden = Boolean(run) && this._panel !== null && !this._store.ended;
    this._hold(ranks);
  }

  receive(message) {
    this._store.receive(message);
    if (!this._panel && message.kind !== "ack") this._panel = new Panel(this._place, this._store, this._commands);
    if (message.kind !== "ack") this._ranks.hidden = !this._store.ended;
  }

  close() {
    this._panel?.close();
    this.node.remove();
  }

  _hold(ranks) {
    const words = ({ rank, pid, device, memory }) => [
      `rank ${rank}`,
      device,
      pid ? `pid ${pid}` : "starting",
      memory ? size(memory) : "",
    ];
    this._ranks.replaceChildren(...ranks.map((one) => element("li", {}, words(one).filter(Boolean).join(" · "))));
  }
}
