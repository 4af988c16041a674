// What is in the address decides what is shown: see index.html.

import { FakeRun } from "./fake.js";

const asked = new URLSearchParams(location.search);
const number = (name, otherwise) => Number(asked.get(name) ?? otherwise);

const run = new FakeRun({
  ranks: number("ranks", 4),
  gpu: asked.has("gpu"),
  metrics: number("metrics", 4),
  slow: asked.has("slow") ? number("slow", 0) : null,
  waits: asked.get("waits") ?? "data",
  long: asked.has("long"),
  nan: asked.has("nan") ? number("nan", 0) : null,
});

// As anywidget hands it to a widget.
class Model {
  constructor(start) {
    this._values = { start };
    this._listeners = [];
    this.sent = [];
  }

  get(name) {
    return this._values[name];
  }

  on(name, listener) {
    this._listeners.push([name, listener]);
  }

  off(name, listener) {
    this._listeners = this._listeners.filter(([a, b]) => a !== name || b !== listener);
  }

  say(message) {
    for (const [name, listener] of this._listeners) if (name === "msg:custom") listener(message, []);
  }

  tell(event) {
    for (const [name, listener] of this._listeners) if (name === event) listener();
  }

  send(message) {
    this.sent.push(message);
    if (message.kind === "earlier" && asked.has("earlier")) setTimeout(() => this.say(run.earlier()));
    if (message.kind === "compare") setTimeout(() => this.say(run.compared(message.run)));
    if (message.kind !== "command") return;
    const words = { stop: "stopping after this step", kill: "killed", stacks: STACKS }[message.command];
    setTimeout(() => this.say({ kind: "ack", id: message.id, command: message.command, ok: true, text: words }), 300);
  }
}

const STACKS = `rank 0: in all_reduce of 1,024 for 3 s
  Cell In[7], line 5: loss.backward()
  torch/autograd/graph.py:841: return Variable._execution_engine.run_backward(...)
rank 1: in forward
  Cell In[7], line 3: out = model(batch)`;

// In place of the server.
class Socket extends EventTarget {
  static OPEN = 1;
  readyState = 1;

  constructor() {
    super();
    window.demo.socket = this;
    setTimeout(() => this.dispatchEvent(new Event("open")));
  }

  send() {}

  say(message) {
    this.dispatchEvent(new MessageEvent("message", { data: JSON.stringify(message) }));
  }
}

// What a Jupyter Server would answer, by the end of an address.
function serve(answers) {
  const config = { baseUrl: "/", opens: "lab/tree/" };
  const own = { id: "jupyter-config-data", type: "application/json", textContent: JSON.stringify(config) };
  document.head.append(Object.assign(document.createElement("script"), own));
  window.fetch = async (url) => {
    const [, found = {}] = Object.entries(answers).find(([end]) => url.endsWith(end)) ?? [];
    return new Response(JSON.stringify(found));
  };
}

// What was run before, of a notebook with ranks and of one without.
function earlierRuns() {
  const before = (number, how, text = "") => {
    const began = 1790000000 - 3600 * number;
    return { number, began, cell: 7, strategy: "ddp", ranks: 2, steps: 36000, seconds: 754, how, text };
  };
  const runs = [before(12, "done"), before(11, "failed", "ValueError on rank 1"), before(10, "killed")];
  return [
    { notebook: "work/digits.ipynb", path: "work/digits.ipynb", runs },
    { notebook: "work/evaluate.ipynb", path: "work/evaluate.ipynb", runs: [before(9, "stopped")] },
  ];
}

window.demo = { run, FakeRun };
const folder = "../../nbtrain/static/";
const sheet = (name) =>
  document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href: folder + name }));
let say;
const place = document.getElementById("nbtrain");

if (asked.has("page")) {
  sheet("page.css");
  window.WebSocket = Socket;
  const session = { type: "notebook", path: "work/digits.ipynb", kernel: { id: run.run.kernel } };
  serve({ "nbtrain/api/runs": earlierRuns(), "api/sessions": [session] });
  await import(`${folder}page.js`);
  await new Promise((later) => setTimeout(later, 50));
  const { kernel, devices } = run.run;
  const memory = (rank) => 3.1e8 + 4e6 * rank;
  const ranks = devices.map((device, rank) => ({ rank, pid: 4712 + rank, device, memory: memory(rank) }));
  const pool = (id, notebook, state, own) => {
    const about = { kernel: id, pid: 4711, notebook, engine: "local", state, run: own, ranks };
    window.demo.socket.say({ kernel: id, about });
  };
  window.demo.kernels = [kernel, "77aa0f1e-idle"];
  window.demo.tell = () => {
    pool(kernel, "work/digits.ipynb", "running", run.run);
    pool("77aa0f1e-idle", "", "idle", null);
    window.demo.socket.say({ kernel, message: run.all() });
  };
  say = (message) => asked.has("empty") || window.demo.socket.say({ kernel, message });
  if (!asked.has("empty")) window.demo.tell();
} else {
  sheet("widget.css");
  document.body.classList.add("plain");
  document.body.classList.toggle("dark", asked.has("dark"));
  const model = new Model(asked.has("empty") ? null : run.all());
  const { default: widget } = await import(`${folder}widget.js`);
  const { initialize, render } = widget();
  window.demo.lose = async (how) => {
    if (how === "restarted") serve({ "nbtrain/api/pools": [{ kernel: run.run.kernel, pid: run.run.pid + 1 }] });
    model.tell("comm:close");
    await new Promise((later) => setTimeout(later, 200));
  };
  initialize({ model });
  window.demo.model = model;
  window.demo.show = () => (window.demo.close = render({ model, el: place }));
  window.demo.show();
  say = (message) => asked.has("empty") || model.say(message);
}

for (let i = 0; i < number("ticks", 300); i++) say(run.news());
const how = asked.get("end");
const words = how === "failed" ? "rank 3: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" : "";
if (how === "lost" || how === "restarted") await window.demo.lose(how);
else if (how === "homeward") say({ ...run.end("done"), kind: "news", ended: undefined, homeward: true });
else if (how) say(run.end(how, words));
else if (!asked.has("still")) setInterval(() => say(run.news()), 100);
window.demo.ready = true;
