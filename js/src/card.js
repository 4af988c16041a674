// One pool on the server's page: whose it is, what its ranks hold, and the run it has or had last.

import { Announcer } from "./announce.js";
import { Commands } from "./commands.js";
import { attribute, element, text } from "./dom.js";
import { size } from "./format.js";
import { lost, whereabouts } from "./liveness.js";
import { Panel } from "./panel.js";
import { Store } from "./store.js";
import { GLYPHS } from "./table.js";

const TONES = { running: "busy", starting: "wait", idle: "quiet" };
const UNNAMED = "a kernel without a notebook";

export class Card {
  constructor(kernel, ask) {
    this.kernel = kernel;
    this._store = new Store(ask);
    // The server told this page of the kernel, so it sees its ranks.
    this._commands = new Commands(this._store, { alive: (run) => whereabouts(run, { seen: true }) });
    this._announcer = new Announcer(this._store, { named: (run) => this._named(run) });
    this._panel = null;
    this._notebook = "";
    this._link = element("a", {}, UNNAMED);
    this._state = element("span", { class: "nbt-run-state" });
    this._more = element("span", { class: "nbt-soft" });
    this._ranks = element("ul", { class: "nbt-pool" });
    this._place = element("div");
    this.earlier = element("div");
    this.order = `~ ${kernel}`;
    this.ranks = [];
    const head = element("div", { class: "nbt-card-head" }, element("h2", {}, this._link), this._state, this._more);
    this.node = element("article", { class: "nbt-card nbt-root" }, head, this._ranks, this._place, this.earlier);
  }

  get notebook() {
    return this._notebook;
  }

  about({ kernel, pid, notebook, engine, ranks, state, run }) {
    this._notebook = notebook;
    this.ranks = ranks;
    this.order = `${notebook || "~"} ${kernel}`; // those without a name last
    const name = base(notebook) || UNNAMED;
    text(this._link, name);
    attribute(this._link, "title", notebook || null);
    attribute(this.node, "aria-label", name);
    text(this._state, `${GLYPHS[TONES[state] ?? "quiet"]} ${state}`);
    attribute(this._state, "data-tone", TONES[state] ?? "quiet");
    text(this._more, [`pid ${pid}`, engine, totals([this])].filter(Boolean).join(" · "));
    if (this._store.run && this._store.run.id !== run?.id) this._store.lose(lost("restarted"));
    // While a run goes on its own table says it, and more.
    this._ranks.hidden = Boolean(run) && this._panel !== null && !this._store.over;
    this._hold(ranks);
  }

  receive(message) {
    this._store.receive(message);
    if (message.kind === "ack") return;
    this._panel ??= new Panel(this._place, this._store, this._commands, { named: (run) => this._named(run) });
    this._ranks.hidden = !this._store.over;
  }

  // `address`: where the notebook is opened.
  opens(address) {
    attribute(this._link, "href", address || null);
  }

  close() {
    this._panel?.close();
    this._announcer.close();
    this.node.remove();
  }

  _named(run) {
    return [base(this._notebook) || UNNAMED, run.cell ? `In [${run.cell}]` : ""].filter(Boolean).join(" ");
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

export const base = (notebook) => notebook.split("/").pop();

// 3 ranks · 1.2 GB
export function totals(cards) {
  const ranks = cards.flatMap((card) => card.ranks);
  const held = ranks.reduce((sum, one) => sum + (one.memory || 0), 0);
  return [`${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"}`, held ? size(held) : ""].filter(Boolean).join(" · ");
}
