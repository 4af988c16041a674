import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";

import { Liveness } from "../src/liveness.js";
import { Store } from "../src/store.js";

const SERVER = { base: "/", headers: {}, token: "" };
const RUN = { id: "r", summary: "", kernel: "k-1", pid: 7, background: false };

const opened = [];

// It is closed also where a test fails: its clock would keep the process alive.
function alive(store) {
  const liveness = new Liveness(store, { find: () => SERVER });
  opened.push(liveness);
  return liveness;
}

afterEach(() => {
  for (const liveness of opened.splice(0)) liveness.close();
  mock.restoreAll();
  mock.timers.reset();
});

let clock = 0;

const all = (seq, now) => ({ kind: "all", seq, run: RUN, now, ranks: [], progress: null, series: {}, ended: null });

function followed() {
  clock = 0;
  const store = new Store(() => {}, { frame: (callback) => callback(), clock: () => clock });
  store.receive(all(0, 10));
  return store;
}

function serve(pools, kernel = 200) {
  mock.method(globalThis, "fetch", async (url) => {
    if (url.endsWith("/pools")) return { status: pools ? 200 : 404, json: async () => pools };
    if (url.endsWith("/run")) return { status: 200, json: async () => all(5, 15) };
    return { status: kernel, json: async () => ({}) };
  });
}

const settled = async () => {
  for (let i = 0; i < 20; i++) await Promise.resolve();
};

const POOL = { kernel: "k-1", pid: 7, state: "running", run: RUN };

// A run that is first heard of now.
async function met(pools) {
  clock = 0;
  const store = new Store(() => {}, { frame: (callback) => callback(), clock: () => clock });
  const liveness = alive(store);
  serve(pools);
  store.receive(all(0, 10));
  await settled();
  return { store, liveness };
}

test("a silent run is asked for, and over when its kernel was restarted", async () => {
  mock.timers.enable({ apis: ["setInterval"] });
  const { store, liveness } = await met([POOL]);
  serve([]);
  mock.timers.tick(5000);
  await settled();
  assert.equal(fetch.mock.callCount(), 0, "news came a moment ago");
  clock = 6000;
  mock.timers.tick(5000);
  await settled();
  assert.equal(store.lost.text, "The kernel was restarted; this run is over.");
  clock = 60000;
  assert.deepEqual([store.elapsed, store.silence, store.over], [16, 0, true], "its clock stands");
});

test("a silent run of a kernel that the server cannot see is not over", async () => {
  const { store, liveness } = await met([]);
  clock = 60000;
  await liveness.check();
  assert.equal(store.lost, null);
  await liveness.disconnected();
  assert.equal(store.lost.text, "The connection to the kernel is lost; this run may be over.");
});

test("the server is asked once when a run is first heard of, and never of one that is over", async () => {
  const { store, liveness } = await met([POOL]);
  const asked = fetch.mock.callCount();
  store.receive({ kind: "news", seq: 1, now: 11, ranks: [], points: {} });
  store.receive(all(2, 12));
  await settled();
  assert.deepEqual([asked, fetch.mock.callCount()], [1, 1]);
  store.receive({ ...all(3, 13), run: { ...RUN, id: "s" }, ended: { how: "done", text: "" } });
  await settled();
  assert.equal(fetch.mock.callCount(), 1);
});

test("a kernel that is busy is waited for", async () => {
  serve([{ kernel: "k-1", pid: 7, state: "silent", run: null }]);
  const store = followed();
  const liveness = alive(store);
  await liveness.check();
  assert.equal(store.lost, null);
});

for (const [what, pools, kernel, words] of [
  ["is over", [{ kernel: "k-1", pid: 8, state: "idle", run: null }], 200, /restarted; this run is over/],
  ["is gone with its kernel", [], 404, /has ended; this run is over/],
  ["is unknown", null, 200, /lost; this run may be over/],
]) {
  test(`a connection is lost, and the run ${what}`, async () => {
    serve(pools, kernel);
    const store = followed();
    const liveness = alive(store);
    await liveness.disconnected();
    assert.match(store.lost.text, words);
    store.receive({ kind: "news", seq: 1, now: 11, ranks: [], points: {} });
    assert.equal(store.lost, null, "what is heard is not lost");
    });
}

test("a connection is lost, and the run goes on: it is followed through the server", async () => {
  serve([{ kernel: "k-1", pid: 7, state: "running", run: RUN }]);
  const store = followed();
  const liveness = alive(store);
  await liveness.disconnected();
  assert.deepEqual([store.lost, store.seq, store.now], [null, 5, 15]);
});

test("a run that has ended stays as it ended", async () => {
  serve([], 404);
  const store = followed();
  store.receive({ kind: "end", seq: 1, now: 11, ended: { how: "done", text: "" }, ranks: [], points: {} });
  const liveness = alive(store);
  await liveness.disconnected();
  assert.equal(store.lost, null);
});
