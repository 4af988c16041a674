// The picker, put together of its parts.

import { attribute, element, text } from "./dom.js";
import { whole } from "./format.js";
import { interrupt } from "./jupyter.js";
import { Cards } from "./picker_cards.js";
import { writeBelow } from "./picker_cell.js";
import { Compared } from "./picker_compared.js";
import { Devices } from "./picker_devices.js";
import { Options } from "./picker_options.js";
import { Wishes } from "./picker_wishes.js";
import { Theme } from "./theme.js";
import "./style.css";
import "./picker.css";

const PATIENCE = 1500; // milliseconds that a kernel may take before it is said that it is busy
const BUSY = "The kernel is busy. This runs when the current cell ends.";
const DOING = { plan: "Estimating …", measure: "Measuring …", verify: "Verifying …" };

export class Picking {
  // `manager`: the widget's, which knows the notebook around it.
  constructor(place, send, manager) {
    this._send = send;
    this._manager = manager;
    this._asked = 0; // the number of a message that was not answered yet
    this._later = null;
    const ask = (message) => this._ask(message);
    this._devices = new Devices();
    this._wishes = new Wishes(ask);
    this._cards = new Cards(ask);
    this._options = new Options(ask);
    this._compared = new Compared(ask);
    this._model = element("span", { class: "nbt-soft" });
    this._why = element("p", { class: "nbt-pick-why" });
    this._line = element("code", { class: "nbt-pick-line", tabindex: 0, "aria-label": "resulting line" });
    const copy = { type: "button", title: "Copy the line", onclick: () => this._copy() };
    this._copyButton = element("button", copy, "Copy");
    this._wrong = element("p", { class: "nbt-pick-wrong", "data-tone": "bad", role: "status" });
    this._note = element("p", { "data-tone": "wait" });
    this._notes = element("ul");
    const summary = element("summary", {}, "Assumptions");
    this._assumed = element("details", { class: "nbt-soft", hidden: true }, summary, this._notes);
    this._measure = element("button", { type: "button", onclick: () => this._run("speed") }, "Measure");
    this._find = element("button", { type: "button", onclick: () => this._run("batch") }, "Find the largest batch");
    this._verify = element(
      "button",
      {
        type: "button",
        title: "Runs the first steps with this line and in one process, and compares them",
        onclick: () => this._check(),
      },
      "Verify",
    );
    this._receipt = element("pre", { class: "nbt-pick-receipt", "aria-label": "verification", hidden: true });
    this._stop = element("button", { type: "button", hidden: true, onclick: () => this._interrupt() }, "Stop");
    this._use = element("button", { type: "button", class: "nbt-primary", onclick: () => this._take() }, "Use in the next cell");
    this._cell = element("span", { class: "nbt-soft" });
    this._said = element("p", { class: "nbt-pick-said", role: "status", "aria-live": "polite" });
    this.node = element(
      "section",
      { class: "nbt-root nbt-pick", "aria-label": "strategy picker", onfocusin: (event) => keep(event.target) },
      element("div", { class: "nbt-pick-head" }, element("strong", {}, "Pick a strategy"), this._model),
      this._devices.node,
      this._wishes.node,
      this._why,
      this._cards.node,
      this._assumed,
      this._options.node,
      element("div", { class: "nbt-pick-result" }, this._line, this._copyButton),
      this._wrong,
      this._note,
      element("div", { class: "nbt-pick-do" }, this._use, this._measure, this._find, this._verify, this._stop, this._cell),
      this._said,
      this._receipt,
      this._compared.node,
    );
    place.append(this.node);
    this._theme = new Theme(this.node);
    this._away = this._theme.subscribe(() => this._compared.look());
  }

  update(data) {
    this._data = data;
    clearTimeout(this._late);
    if (data.answered === this._asked) this._asked = 0;
    const waits = Boolean(this._asked);
    this._devices.update(data);
    this._wishes.update(data, waits);
    this._cards.update(data);
    this._options.update(data, waits);
    this._compared.update(data.compared);
    text(this._receipt, data.receipt?.text ?? "");
    this._receipt.hidden = !data.receipt;
    attribute(this._receipt, "data-state", data.receipt?.state || null);
    text(this._model, describe(data));
    text(this._why, data.lacks || (data.plan?.why ? `★ ${data.plan.why}` : ""));
    text(this._line, data.line);
    this._line.hidden = this._copyButton.hidden = !data.line;
    text(this._wrong, data.wrong);
    text(this._note, data.note);
    this._assume(data.plan?.notes ?? []);
    this._buttons(data);
    this._say(...(data.said[0] ? data.said : [DOING[data.busy] ?? "", "busy"]));
    if (!waits && data.busy !== "plan") this._afterwards(data);
  }

  _afterwards(data) {
    const later = this._later;
    this._later = null;
    if (data.line) later?.();
  }

  close() {
    clearTimeout(this._late);
    this._away();
    this._theme.close();
    this._wishes.close();
    this._options.close();
    this.node.remove();
  }

  _assume(notes) {
    this._assumed.hidden = !notes.length;
    if (notes.join() === this._assumes) return;
    this._assumes = notes.join();
    this._notes.replaceChildren(...notes.map((note) => element("li", {}, note)));
  }

  _buttons(data) {
    const measuring = data.busy === "measure" || data.busy === "verify";
    const ticked = this._cards.ticked.length;
    text(this._measure, ticked ? `Measure ${ticked}` : "Measure");
    this._measure.disabled = measuring || !ticked;
    this._find.hidden = data.goal !== "batch";
    this._find.disabled = this._measure.disabled;
    this._use.disabled = !data.line;
    this._verify.disabled = measuring || !data.line;
    this._stop.hidden = !measuring;
    text(this._cell, measuring ? "" : data.cell);
  }

  _ask(message) {
    if (message.kind === "tick") return this._buttons(this._data);
    // Later than any number that another page, or this one before it was loaded again, has given.
    this._asked = Math.max(Date.now(), this._asked + 1);
    this._send({ ...message, seq: this._asked });
    clearTimeout(this._late);
    this._late = setTimeout(() => this._say(BUSY, "wait"), PATIENCE);
  }

  _run(goal) {
    this._ask({ kind: "measure", goal, names: this._cards.ticked });
    clearTimeout(this._late);
    this._say(DOING.measure, "busy");
  }

  _check() {
    this._ask({ kind: "verify" });
    clearTimeout(this._late);
    this._say(DOING.verify, "busy");
  }

  async _interrupt() {
    const done = await interrupt(this._data.kernel);
    if (!done) this._say("Press ■ in the notebook's toolbar to stop.", "wait");
  }

  _take() {
    if (this._asked) {
      this._later = () => this._take(); // what was typed last is not in the line yet
      return;
    }
    const { line, magic, flags } = this._data;
    this._ask({ kind: "use", written: writeBelow(this.node, this._manager, line, magic, flags) });
  }

  async _copy() {
    try {
      await navigator.clipboard.writeText(this._data.line);
      this._say("Copied.", "good");
    } catch {
      getSelection().selectAllChildren(this._line);
      this._say("The line is selected: press Ctrl+C or Cmd+C.", "wait");
    }
  }

  _say(words, tone) {
    text(this._said, words);
    attribute(this._said, "data-tone", words ? tone : null);
  }
}

// Letters and arrows are the form's own, not JupyterLab's shortcuts: it asks what has the focus.
function keep(focused) {
  focused.setAttribute("data-lm-suppress-shortcuts", "true");
}

// net · 14,200,000 parameters · AdamW · 32 samples
function describe({ plan }) {
  if (!plan) return "";
  const words = [plan.model, `${whole(plan.parameters)} parameters`];
  if (plan.optimizer) words.push(plan.optimizer);
  return words.join(" · ");
}
