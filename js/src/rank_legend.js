// What mean and band look like, and a button for each rank, which shows its line in all charts.

import { sample } from "./chart.js";
import { partColour, rankColour, rankDash } from "./curve_settings.js";
import { attribute, element, style } from "./dom.js";

const WORDED = 8; // of more ranks a button has the number only

export class RankLegend {
  constructor(settings, theme) {
    Object.assign(this, { settings, theme });
    this.node = element("div", { class: "nbt-legend nbt-ranks", role: "group", "aria-label": "lines of the charts" });
    this._made = "";
    this._buttons = new Map();
    this._away = [settings.subscribe(() => this._press()), theme.subscribe(() => this._make())];
  }

  // One rank needs no legend.
  update(ranks) {
    const sorted = [...ranks].sort((a, b) => a - b);
    if (sorted.join() === this._made) return;
    this._made = sorted.join();
    this._ranks = sorted.length > 1 ? sorted : [];
    this._make();
  }

  close() {
    for (const end of this._away) end();
  }

  _make() {
    const { theme } = this;
    const few = this._ranks.length <= WORDED;
    const button = (rank) => {
      const words = few ? `rank ${rank}` : String(rank);
      const about = { type: "button", "aria-label": `rank ${rank}`, title: `show the line of rank ${rank}` };
      const made = element("button", { ...about, onclick: () => this.settings.toggle(rank) }, words);
      made.prepend(sample(rankColour(theme, rank), rankDash(theme, rank)));
      style(made, { "--nbt-rank": rankColour(theme, rank) });
      return made;
    };
    this._buttons = new Map(this._ranks.map((rank) => [rank, button(rank)]));
    const band = element("i", { class: "nbt-band" });
    style(band, { "--nbt-rank": partColour(theme, 0) });
    const keys = [
      element("span", { class: "nbt-key" }, sample(partColour(theme, 0)), "mean"),
      element("span", { class: "nbt-key" }, band, "lowest to highest"),
    ];
    this.node.replaceChildren(
      ...(this._ranks.length ? keys : []),
      ...(few ? [] : ["ranks"]),
      ...this._buttons.values(),
    );
    this.node.classList.toggle("nbt-many", !few);
    this.node.hidden = !this._ranks.length;
    this._press();
  }

  _press() {
    for (const [rank, button] of this._buttons)
      attribute(button, "aria-pressed", String(this.settings.ranks.has(rank)));
  }
}
