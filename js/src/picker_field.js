// One input with its label: a number, a choice, a switch or a text. What is typed is told when somebody pauses.

import { attribute, element, text } from "./dom.js";

const PAUSE = 400; // milliseconds
let made = 0;

export class Field {
  constructor({ kind, label, help = "", min = null, changed }) {
    this._kind = kind;
    this._changed = changed;
    const id = `nbt-pick-field-${made++}`;
    const told = help ? `${id}-help` : null;
    const wrong = `${id}-wrong`;
    this._least = min;
    this._label = label;
    this._input = input(kind, { id, min, "aria-describedby": [told, wrong].filter(Boolean).join(" ") });
    this._input.addEventListener("change", () => this._tell());
    if (kind === "number" || kind === "text") {
      this._input.addEventListener("input", () => {
        clearTimeout(this._timer);
        this._timer = setTimeout(() => this._tell(), PAUSE);
      });
    }
    this.node = element("div", { class: `nbt-pick-field nbt-pick-${kind === "switch" ? "check" : kind}` }, element("label", { for: id }, label));
    this.node[kind === "switch" ? "prepend" : "append"](this._input);
    if (help) this.node.append(element("small", { class: "nbt-soft", id: told }, help));
    this._wrong = element("small", { class: "nbt-pick-invalid", id: wrong, "data-tone": "bad", role: "status" });
    this.node.append(this._wrong);
  }

  // `waits`: the kernel has not heard yet what was typed last.
  update({ value, choices = [] }, waits) {
    if (this._kind === "choice") this._offer(choices);
    if (waits && this._input.matches(":focus")) return;
    if (this._timer && this._value() !== value) return; // somebody is typing
    this._told = value;
    if (this._kind === "switch") this._input.checked = value === "on";
    else if (this._input.value !== value) this._input.value = value;
    this._valid();
  }

  close() {
    clearTimeout(this._timer);
  }

  _tell() {
    clearTimeout(this._timer);
    this._timer = null;
    const value = this._value();
    if (!this._valid() || value === this._told) return;
    this._told = value;
    this._changed(value);
  }

  // Says why a value is not taken.
  _valid() {
    const valid = this._input.checkValidity();
    text(this._wrong, valid ? "" : `${this._label} must be a number${this._least === null ? "" : `, ${this._least} or more`}`);
    attribute(this._input, "aria-invalid", valid ? null : "true");
    return valid;
  }

  _value() {
    return this._kind === "switch" ? (this._input.checked ? "on" : "off") : this._input.value.trim();
  }

  _offer(choices) {
    if (this._choices === choices.join("\n")) return;
    this._choices = choices.join("\n");
    this._input.replaceChildren(...choices.map((choice) => element("option", { value: choice }, choice)));
  }
}

function input(kind, attributes) {
  if (kind === "choice") return element("select", attributes);
  const types = { number: { type: "number", step: "any" }, switch: { type: "checkbox" }, text: { type: "text" } };
  const made = element("input", { ...attributes, ...types[kind], spellcheck: "false", autocomplete: "off" });
  attribute(made, "min", attributes.min);
  return made;
}
