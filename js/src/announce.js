// Says how a run begins and ends to who does not look at it: to screen readers, in the title of a tab that is not seen,
// and as a notification of the browser where that is allowed.

import { element, text } from "./dom.js";
import { duration } from "./format.js";

const LONG = 60; // seconds: who starts a shorter run watches it

const GLYPHS = { done: "✓", failed: "✕" };

export class Announcer {
  // `named(run)`: the run in a few words.
  constructor(store, { named = (run) => (run.cell ? `In [${run.cell}]` : run.summary) } = {}) {
    this._store = store;
    this._named = named;
    this._going = null; // id of the run that was seen while it went on
    this._end = store.listen(() => this._heard());
    this._heard();
  }

  close() {
    this._end();
  }

  _heard() {
    const { run, ended, lost, now, alerts } = this._store;
    if (!run) return;
    const name = this._named(run);
    if (!ended && !lost) {
      if (this._going === run.id) return;
      this._going = run.id;
      return speak(`${name} is running: ${run.summary}`);
    }
    if (this._going !== run.id) return;
    this._going = null;
    if (lost) return speak(`${name}: ${lost.text}`);
    const words = `${name}: ${ended.how} after ${duration(now)}`;
    const more = [ended.how === "failed" ? ended.text : "", ...alerts].filter(Boolean).join(". ");
    speak(more ? `${words}. ${more}` : words, ended.how === "failed");
    if (now < LONG) return;
    mark(`${GLYPHS[ended.how] ?? "○"} ${ended.how}`);
    notify(words, more || run.summary, run.id);
  }
}

// Whether the user has not yet said if notifications are allowed. He is asked when he presses the button, and only then.
export const mayAskToNotify = () => globalThis.Notification?.permission === "default";

export const askToNotify = async () => globalThis.Notification?.requestPermission();

function notify(title, body, tag) {
  if (globalThis.Notification?.permission !== "granted" || document.hasFocus()) return;
  try {
    new Notification(title, { body, tag }); // of several pages that show one run the tag lets one speak
  } catch {
    // a browser that has them for service workers only
  }
}

let marked = null; // { title, before }: of the tab, with the end of a run in it and without

// In the title of a tab that is not seen, until it is. Of several runs that end meanwhile the last one is there.
function mark(words) {
  if (!document.hidden) return;
  const before = marked?.title === document.title ? marked.before : document.title;
  if (!marked) document.addEventListener("visibilitychange", unmark);
  marked = { title: `${words} · ${before}`, before };
  document.title = marked.title;
}

function unmark() {
  if (document.hidden) return;
  document.removeEventListener("visibilitychange", unmark);
  if (document.title === marked.title) document.title = marked.before;
  marked = null;
}

// Below the page's body, and not in the panel: when a run ends, a picture takes the panel's place.
function speak(words, urgent = false) {
  const [polite, assertive] = regions();
  text(urgent ? assertive : polite, words);
  text(urgent ? polite : assertive, "");
}

function regions() {
  const found = document.querySelectorAll("body > .nbt-heard");
  if (found.length) return found;
  const made = [
    element("div", { class: "nbt-heard", role: "status", "aria-live": "polite" }),
    element("div", { class: "nbt-heard", role: "alert", "aria-live": "assertive" }),
  ];
  document.body.append(...made);
  return made;
}
