import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";

import { Announcer } from "../src/announce.js";
import { Store } from "../src/store.js";

const RUN = { id: "r", cell: 3, summary: "ddp · 2 ranks", kernel: "", background: false };

// As much of a page as an announcement needs.
class Node extends EventTarget {
  children = [];
  attributes = {};
  textContent = "";

  setAttribute(name, value) {
    this.attributes[name] = value;
  }

  append(...nodes) {
    this.children.push(...nodes);
  }
}

let notified = [];

beforeEach(() => {
  notified = [];
  const body = new Node();
  const page = new Node();
  Object.assign(page, { body, title: "digits - JupyterLab", hidden: false, hasFocus: () => !page.hidden });
  page.createElement = () => new Node();
  page.querySelectorAll = () => body.children;
  globalThis.document = page;
  globalThis.Notification = class {
    static permission = "granted";
    constructor(title, rest) {
      notified.push([title, rest]);
    }
  };
});

afterEach(() => {
  delete globalThis.document;
  delete globalThis.Notification;
});

function watched(run = RUN, ended = null) {
  const store = new Store(() => {}, { frame: () => {}, clock: () => 0 }); // a tab that is not drawn
  store.receive({ kind: "all", seq: 0, run, now: 0, ranks: [], progress: null, series: {}, ended });
  return [store, new Announcer(store)];
}

const end = (how, now, more = {}) => ({ kind: "end", seq: 1, now, ended: { how, text: "" }, ranks: [], points: {}, ...more });
const spoken = () => document.body.children.map((node) => node.textContent);

test("a screen reader hears start and end, and nothing between", () => {
  const [store] = watched();
  assert.deepEqual(spoken(), ["In [3] is running: ddp · 2 ranks", ""]);
  document.body.children[0].textContent = "";
  store.receive({ kind: "news", seq: 1, now: 1, ranks: [], points: {} });
  assert.deepEqual(spoken(), ["", ""]);
  store.receive({ ...end("done", 12, { alerts: ["loss is NaN: first at step 3"] }), seq: 2 });
  assert.deepEqual(spoken(), ["In [3]: done after 0:12. loss is NaN: first at step 3", ""]);
  assert.deepEqual(document.body.children.map((node) => node.attributes.role), ["status", "alert"]);
});

test("a failure is an alert", () => {
  const [store] = watched();
  store.receive(end("failed", 2, { ended: { how: "failed", text: "ValueError: no" } }));
  assert.deepEqual(spoken(), ["", "In [3]: failed after 0:02. ValueError: no"]);
});

test("of a long run a tab that is not seen says the end, until it is seen", () => {
  const [store] = watched();
  document.hidden = true;
  store.receive(end("done", 61));
  assert.equal(document.title, "✓ done · digits - JupyterLab");
  assert.deepEqual(notified, [["In [3]: done after 1:01", { body: "ddp · 2 ranks", tag: "r" }]]);
  document.hidden = false;
  document.dispatchEvent(new Event("visibilitychange"));
  assert.equal(document.title, "digits - JupyterLab");
});

test("of several long runs the last one is in the title, and then none", () => {
  const both = [watched(), watched({ ...RUN, id: "s", cell: 4 })];
  document.hidden = true;
  both[0][0].receive(end("done", 61));
  both[1][0].receive(end("failed", 90));
  assert.equal(document.title, "✕ failed · digits - JupyterLab");
  document.hidden = false;
  document.dispatchEvent(new Event("visibilitychange"));
  assert.equal(document.title, "digits - JupyterLab");
});

test("of a short run, and where somebody looks, or forbids it, nothing is notified", () => {
  const [short] = watched();
  document.hidden = true;
  short.receive(end("done", 59));
  assert.equal(document.title, "digits - JupyterLab");
  document.hidden = false;
  const [seen] = watched({ ...RUN, id: "s" });
  seen.receive(end("done", 100));
  Notification.permission = "default";
  document.hidden = true;
  const [asked] = watched({ ...RUN, id: "t" });
  asked.receive(end("done", 100));
  assert.deepEqual(notified, []);
});

test("a run that had ended before the page was there is no news", () => {
  document.hidden = true;
  watched(RUN, { how: "done", text: "" });
  assert.deepEqual([spoken(), notified], [[], []]);
});
