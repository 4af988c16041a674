// Stop, Stacks and Kill, and what became of them.

import { attribute, element, text } from "./dom.js";

export class Controls {
  constructor(commands) {
    this._commands = commands;
    this._last = 0;
    const button = (command, words, title) =>
      element("button", { type: "button", title, onclick: () => this._run(command) }, words);
    this._ask = element(
      "button",
      { type: "button", title: "end the processes of all ranks", onclick: () => this._sure(true) },
      "Kill",
    );
    this._keep = element("button", { type: "button", onclick: () => this._sure(false) }, "No");
    const kill = element("button", { type: "button", class: "nbt-danger", onclick: () => this._kill() }, "Kill them");
    this._question = element(
      "span",
      { class: "nbt-question", hidden: true },
      "Kill all ranks? What they hold is lost.",
      kill,
      this._keep,
    );
    this.buttons = element(
      "span",
      { class: "nbt-buttons" },
      button("stop", "Stop", "stop after the step that is under way"),
      button("stacks", "Stacks", "where every rank is in its code"),
      this._ask,
      this._question,
    );
    // A live region must be there before it has something to say.
    this.said = element("div", { class: "nbt-said", role: "status", "aria-live": "polite" });
    this.buttons.addEventListener("keydown", (event) => event.key === "Escape" && this._sure(false));
  }

  update({ run, ended }) {
    this.buttons.hidden = !run || Boolean(ended);
  }

  // What is still to be said about the last run is not.
  forget() {
    this._last += 1;
    this._say("", null);
  }

  _say(words, tone) {
    const several = words.includes("\n");
    text(this.said, words);
    attribute(this.said, "data-tone", several ? null : tone);
    this.said.classList.toggle("nbt-code", several);
  }

  _sure(asking) {
    if (this._question.hidden !== asking) return;
    this._question.hidden = !asking;
    this._ask.hidden = asking;
    (asking ? this._keep : this._ask).focus();
  }

  _kill() {
    this._sure(false);
    this._run("kill");
  }

  async _run(command) {
    const mine = ++this._last;
    await this._commands.run(command, (words, tone) => {
      if (mine === this._last) this._say(words, tone); // else another button was pressed since
    });
  }
}
