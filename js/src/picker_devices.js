// The devices that were found, and how much of their memory is in use.

import { element, style, text } from "./dom.js";
import { size } from "./format.js";

export class Devices {
  constructor() {
    this.node = element("ul", { class: "nbt-pick-devices", "aria-label": "devices found" });
    this._state = "";
  }

  update({ found, plan }) {
    const state = JSON.stringify([found, plan?.room]);
    if (state === this._state) return;
    this._state = state;
    this.node.replaceChildren(...found.map((one) => device(one)));
    if (plan?.room) this.node.append(element("li", { class: "nbt-soft" }, plan.room));
  }
}

function device({ name, total, used }) {
  const words = total ? `${size(used)} of ${size(total)} in use` : "";
  const bar = element("span", { class: "nbt-bar", "aria-hidden": "true" }, element("i"));
  style(bar.firstChild, { width: `${total ? (100 * used) / total : 0}%` });
  const told = element("span", { class: "nbt-soft" });
  text(told, words);
  return element("li", {}, element("span", {}, name), bar, told);
}
