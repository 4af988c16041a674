import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";

import { Commands } from "../src/commands.js";
import { Liveness } from "../src/liveness.js";
import { Store } from "../src/store.js";

const SERVER = { base: "/a/b/", headers: { "X-XSRFToken": "x" }, token: "" };

afterEach(() => mock.restoreAll());

function all(background = false) {
  const run = { id: "r", summary: "", kernel: "k-1", pid: 7, background };
  return { kind: "all", seq: 0, run, now: 0, ranks: [], progress: null, series: {}, ended: null };
}

const empty = () => new Store(() => {}, { frame: (callback) => callback(), clock: () => 0 });

function running(background = false) {
  const store = empty();
  store.receive(all(background));
  return store;
}

// `answers`: the end of an address -> what the server says there; what is not there is 404.
function serve(answers) {
  const asked = [];
  mock.method(globalThis, "fetch", async (url, { method, body, headers }) => {
    if (method === "POST") asked.push([url, JSON.parse(body), headers]);
    const found = Object.entries(answers).find(([end]) => url.endsWith(end));
    if (!found) return { status: 404, json: async () => null };
    return { status: found[1] ? 200 : 204, json: async () => found[1] };
  });
  return asked;
}

const KERNEL = { "/api/kernels/k-1": {} }; // it lives, and the server has no nbtrain

async function run(store, command, options) {
  const said = [];
  await new Commands(store, options).run(command, (words, tone) => said.push([words, tone]));
  return said;
}

test("the server's own extension comes first", async () => {
  const asked = serve({ "/command": { ok: true, text: "stopping after this step" } });
  const said = await run(running(), "stop", { find: () => SERVER, send: assert.fail });
  const [[url, body, headers], ...more] = asked;
  assert.equal(url, "/a/b/nbtrain/api/pools/k-1/command");
  assert.deepEqual([body.command, headers["X-XSRFToken"], more.length], ["stop", "x", 0]);
  assert.match(body.id, /^[0-9a-f]+$/);
  assert.deepEqual(said.at(-1), ["stopping after this step", "good"]);
});

test("what is refused is said", async () => {
  const pools = [{ kernel: "k-1", pid: 7, state: "running", run: { id: "r" } }];
  serve({ "/command": { ok: false, text: "nothing runs" }, "/api/pools": pools });
  assert.deepEqual((await run(running(), "stop", { find: () => SERVER })).at(-1), ["nothing runs", "bad"]);
});

test("to stop, the kernel is interrupted next", async () => {
  const asked = serve({ "/interrupt": null, ...KERNEL });
  const said = await run(running(), "stop", { find: () => SERVER, send: assert.fail });
  assert.equal(asked.at(-1)[0], "/a/b/api/kernels/k-1/interrupt");
  assert.equal(said.at(-1)[0], "stop: the kernel was interrupted");
});

for (const [command, background] of [
  ["kill", false],
  ["stacks", false],
  ["stop", true],
]) {
  test(`${command}${background ? " of a run in the background" : ""} never interrupts the kernel`, async () => {
    const asked = serve({ "/interrupt": null, ...KERNEL });
    const store = running(background);
    const send = ({ id }) => store.receive({ kind: "ack", id, command, ok: true, text: "heard" });
    const said = await run(store, command, { find: () => SERVER, send });
    assert.ok(asked.every(([url]) => !url.endsWith("/interrupt")));
    assert.deepEqual(said.at(-1), ["heard", "good"]);
  });
}

test("without a server the kernel is asked, and a busy one said to be busy", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const store = running();
  const sent = [];
  const said = [];
  const done = new Commands(store, { find: () => null, send: (message) => sent.push(message) }).run(
    "stop",
    (...words) => said.push(words),
  );
  assert.deepEqual([sent[0].kind, sent[0].command], ["command", "stop"]);
  mock.timers.tick(1600);
  assert.match(said.at(-1)[0], /the kernel is busy .* ■/);
  store.receive({ kind: "ack", id: sent[0].id, command: "stop", ok: true, text: "stopping" });
  await done;
  assert.deepEqual(said.at(-1), ["stopping", "good"]);
  mock.timers.reset();
});

test("a run that ends meanwhile needs no answer", async () => {
  const store = running();
  const end = { kind: "end", seq: 1, now: 1, ended: { how: "done", text: "" }, ranks: [], points: {} };
  const said = await run(store, "stop", { find: () => null, send: () => store.receive(end) });
  assert.deepEqual(said.at(-1), ["", null], "the panel says how");
});

test("nobody to ask is said", async () => {
  const said = await run(running(), "kill", { find: () => null });
  assert.match(said.at(-1)[0], /nobody answered/);
});

const RESTARTED = "The kernel was restarted; this run is over.";

for (const [what, answers, words] of [
  ["another process", { "/api/pools": [{ kernel: "k-1", pid: 8, state: "silent", run: null }] }, RESTARTED],
  ["another run", { "/api/pools": [{ kernel: "k-1", pid: 7, state: "running", run: { id: "s" } }] }, "This run is over."],
  ["no kernel", { "/api/pools": [] }, "The kernel has ended; this run is over."],
]) {
  test(`what was to be stopped is gone, there is ${what}: nothing is interrupted`, async () => {
    const asked = serve({ "/interrupt": null, ...answers });
    const store = running();
    const said = await run(store, "stop", { find: () => SERVER, send: assert.fail });
    assert.deepEqual(asked.map(([url]) => url.split("/").at(-1)), ["command"]);
    assert.equal(asked[0][1].run, "r");
    assert.equal(store.lost.text, words);
    assert.deepEqual(said.at(-1), ["", null], "the panel says it");
  });
}

const POOL = { kernel: "k-1", pid: 7, state: "running", run: { id: "r" } };

test("a kernel whose ranks the server saw, and sees no more, was restarted: the new one is not interrupted", async (t) => {
  const answers = { "/interrupt": null, ...KERNEL };
  const asked = serve(answers);
  const store = empty();
  const liveness = new Liveness(store, { find: () => SERVER });
  t.after(() => liveness.close());
  answers["/api/pools"] = [POOL];
  store.receive(all());
  await new Promise((later) => setTimeout(later));
  answers["/api/pools"] = [];
  const alive = (run) => liveness.whereabouts(run);
  await run(store, "stop", { find: () => SERVER, send: assert.fail, alive });
  assert.deepEqual(asked.map(([url]) => url.split("/").at(-1)), ["command"]);
  assert.equal(store.lost.text, RESTARTED);
});

test("a kernel whose ranks the server never sees, as behind a gateway, is interrupted", async (t) => {
  const asked = serve({ "/interrupt": null, "/api/pools": [], ...KERNEL });
  const store = empty();
  const liveness = new Liveness(store, { find: () => SERVER });
  t.after(() => liveness.close());
  store.receive(all());
  const alive = (run) => liveness.whereabouts(run);
  const said = await run(store, "stop", { find: () => SERVER, send: assert.fail, alive });
  assert.equal(asked.at(-1)[0], "/a/b/api/kernels/k-1/interrupt");
  assert.deepEqual([said.at(-1)[0], store.lost], ["stop: the kernel was interrupted", null]);
});

test("its ranks are reached through the kernel where it cannot be interrupted", async () => {
  serve({ "/api/pools": [], ...KERNEL });
  const store = running();
  const send = ({ id, command }) => store.receive({ kind: "ack", id, command, ok: true, text: "stopping" });
  assert.deepEqual((await run(store, "stop", { find: () => SERVER, send })).at(-1), ["stopping", "good"]);
});

test("a kernel that is busy in C code is the same, and is interrupted", async () => {
  const pools = [{ kernel: "k-1", pid: 7, state: "silent", run: null }];
  const asked = serve({ "/interrupt": null, "/api/pools": pools });
  await run(running(), "stop", { find: () => SERVER, send: assert.fail });
  assert.equal(asked.at(-1)[0], "/a/b/api/kernels/k-1/interrupt");
});
