// A chart over the whole page, and back: a dialog of the browser's, which Escape closes.

import { element } from "./dom.js";

export class FullSize {
  // `node` goes into the dialog; `focus` has the keyboard there; `changed(open)` is called after it went or came back.
  constructor(node, focus, changed) {
    Object.assign(this, { node, focus, changed });
    this.dialog = null; // while it is there
  }

  get open() {
    return this.dialog !== null;
  }

  toggle() {
    this.open ? this.close() : this._show();
  }

  close() {
    const dialog = this.dialog;
    if (!dialog) return;
    this.dialog = null;
    dialog.replaceWith(this.node);
    this.changed(false);
    this.focus.focus({ preventScroll: true });
  }

  _show() {
    const label = this.node.getAttribute("aria-label");
    const dialog = element("dialog", { class: "nbt-full", "aria-label": label, onclose: () => this.close() });
    dialog.setAttribute("data-lm-suppress-shortcuts", "true");
    dialog.addEventListener("click", (event) => event.target === dialog && this.close());
    // Escape is the dialog's own, and not also the notebook's.
    dialog.addEventListener("keydown", (event) => event.stopPropagation());
    this.node.replaceWith(dialog);
    dialog.append(this.node);
    this.dialog = dialog;
    dialog.showModal();
    this.focus.focus();
    this.changed(true);
  }
}
