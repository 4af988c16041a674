// Stop, Stacks, Kill, Freeze and Notify, and what became of them.

import { askToNotify, mayAskToNotify } from "./announce.js";
import { attribute, element, text } from "./dom.js";

const COMMANDS = {
  stop: ["Stop", "stop after the step that is under way"],
  stacks: ["Stacks", "show where every rank is in its code"],
  kill: ["Kill", "end the processes of all ranks"],
};

export class Controls {
  // `named(run)` says which run a button acts on; `freeze()` is called when drawing is to stop or go on.
  constructor(commands, { named = cell, freeze = () => {} } = {}) {
    this._commands = commands;
    this._named = named;
    this._told = freeze;
    this._last = 0;
    this.frozen = false;
    const does = { stop: () => this._run("stop"), stacks: () => this._run("stacks"), kill: () => this._sure(true) };
    this._buttons = new Map(Object.entries(COMMANDS).map(([name, words]) => [name, button(...words, does[name])]));
    this._keep = button("No", "let them go on", () => this._sure(false));
    const kill = button("Kill them", "", () => this._kill());
    kill.classList.add("nbt-danger");
    this._question = element(
      "span",
      { class: "nbt-question", hidden: true },
      "Kill all ranks? What they hold is lost.",
      kill,
      this._keep,
    );
    this._freeze = button("Freeze", "stop drawing; the run goes on", () => this._toggle());
    this._notify = button("Notify", "let the browser tell you when a run of more than a minute ends", () => this._ask());
    const own = [this._question, this._freeze, this._notify];
    this.buttons = element("span", { class: "nbt-buttons" }, ...this._buttons.values(), ...own);
    // A live region must be there before it has something to say.
    this.said = element("div", { class: "nbt-said", role: "status", "aria-live": "polite" });
    this.buttons.addEventListener("keydown", (event) => event.key === "Escape" && this._sure(false));
  }

  update({ run, idle }) {
    const gone = !run || idle;
    const ends = gone && !this.buttons.hidden;
    this.buttons.hidden = gone;
    if (ends) this.forget();
    this._notify.hidden = !mayAskToNotify();
    const name = run ? this._named(run) : "";
    for (const [command, node] of this._buttons) {
      attribute(node, "aria-label", name ? `${COMMANDS[command][0]} ${name}` : null);
    }
  }

  // What was said and asked no longer holds: the run is over, or another one has begun.
  forget() {
    this._last += 1;
    this._say("", null);
    this._question.hidden = true;
    this._buttons.get("kill").hidden = false;
    if (this.frozen) this._toggle();
  }

  _say(words, tone) {
    const several = words.includes("\n");
    text(this.said, words);
    attribute(this.said, "data-tone", several ? null : tone);
    this.said.classList.toggle("nbt-code", several);
  }

  _sure(asking) {
    const kill = this._buttons.get("kill");
    if (this._question.hidden !== asking) return;
    this._question.hidden = !asking;
    kill.hidden = asking;
    (asking ? this._keep : kill).focus();
  }

  _kill() {
    this._sure(false);
    this._run("kill");
  }

  _toggle() {
    this.frozen = !this.frozen;
    text(this._freeze, this.frozen ? "Unfreeze" : "Freeze");
    this._told();
  }

  async _ask() {
    await askToNotify();
    this._notify.hidden = !mayAskToNotify();
  }

  async _run(command) {
    const mine = ++this._last;
    await this._commands.run(command, (words, tone) => {
      if (mine === this._last) this._say(words, tone); // else another button was pressed since
    });
  }
}

const cell = (run) => (run.cell ? `In [${run.cell}]` : "");

const button = (words, title, does) => element("button", { type: "button", title, onclick: does }, words);
