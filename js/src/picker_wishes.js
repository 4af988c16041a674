// What the plan depends on: ranks, batch, precision, and what it is for.

import { element } from "./dom.js";
import { Field } from "./picker_field.js";

const GOALS = { speed: "speed", batch: "largest batch", model: "largest model" };
const LOSSES = { no: "none", small: "small", any: "any" };
let made = 0;

export class Wishes {
  constructor(ask) {
    this._ask = ask;
    const set = (name) => (value) => ask({ kind: "set", name, value });
    this._ranks = new Field({ kind: "number", label: "Ranks", min: 1, changed: set("ranks") });
    this._batch = new Field({ kind: "number", label: "Batch per rank", min: 1, changed: set("batch") });
    this._precision = new Field({ kind: "choice", label: "Precision", changed: set("precision") });
    this._goal = new Switch("Goal", GOALS, set("goal"));
    this._loss = new Switch("Acceptable slowdown", LOSSES, set("loss"));
    const fields = [this._ranks, this._batch, this._precision, this._goal, this._loss];
    this.node = element("div", { class: "nbt-pick-wishes" }, ...fields.map((field) => field.node));
  }

  update(data, waits) {
    this._ranks.update({ value: String(data.ranks) }, waits);
    this._batch.update({ value: String(data.batch ?? data.plan?.samples ?? "") }, waits);
    this._precision.update({ value: data.precision, choices: data.precisions }, waits);
    this._goal.update(data.goal, false);
    this._loss.update(data.loss, data.goal === "speed");
  }

  close() {
    for (const field of [this._ranks, this._batch, this._precision]) field.close();
  }
}

// A few words of which one holds: radio buttons, so that arrows go from one to the next.
class Switch {
  constructor(label, words, changed) {
    const name = `nbt-pick-${made++}`;
    this._inputs = new Map();
    const choices = Object.entries(words).map(([value, shown]) => {
      const input = element("input", { type: "radio", name, value, onchange: () => changed(value) });
      this._inputs.set(value, input);
      return element("label", {}, input, element("span", {}, shown));
    });
    const row = element("span", { class: "nbt-pick-switch" }, ...choices);
    this.node = element("fieldset", { class: "nbt-pick-field" }, element("legend", {}, label), row);
  }

  update(value, disabled) {
    for (const [each, input] of this._inputs) input.checked = each === value;
    this.node.disabled = disabled;
  }
}
