// The devices that were found, and how much of their memory is in use.

import { element, style } from "./dom.js";
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
    // One device's memory is told by the plan, which knows what of it the ranks have.
    const told = found.length > 1 || !plan?.room;
    this.node.replaceChildren(...found.map((one) => device(one, told)));
    if (plan?.room) this.node.append(element("li", { class: "nbt-soft" }, plan.room));
  }
}

function device({ name, total, used }, told) {
  const words = total && told ? `${size(used)} of ${size(total)} in use` : "";
  const bar = element("span", { class: "nbt-bar", "aria-hidden": "true" }, element("i"));
  style(bar.firstChild, { width: `${total ? (100 * used) / total : 0}%` });
  return element("li", {}, element("span", {}, name), bar, element("span", { class: "nbt-soft" }, words));
}
