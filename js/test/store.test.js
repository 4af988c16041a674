import assert from "node:assert/strict";
import { test } from "node:test";

import { FakeRun } from "../demo/fake.js";
import { charts, Store } from "../src/store.js";

function watched() {
  const asked = [];
  const frames = [];
  let time = 0;
  const options = { frame: (callback) => frames.push(callback), clock: () => time };
  const store = new Store(() => asked.push(time), options);
  return { store, asked, frames, pass: (milliseconds) => (time += milliseconds) };
}

test("everything, then what is new", () => {
  const { store, asked } = watched();
  const run = new FakeRun({ ranks: 2, metrics: 1 });
  store.receive(run.all());
  store.receive(run.news());
  store.receive({ kind: "news", seq: 2, now: 0.2, ranks: [{ rank: 1, state: "waiting for data" }], points: {} });
  assert.equal(store.run.summary, run.run.summary);
  assert.equal(store.ranks.get(1).state, "waiting for data");
  assert.equal(store.ranks.get(1).step, 3);
  assert.equal(store.ranks.get(0).state, "running");
  assert.equal(store.series.get("metric/loss/1").count, 3);
  assert.equal(store.progress.done, 3);
  store.receive({ ...run.end("stopped", "by you"), seq: 3 });
  assert.deepEqual([store.ended.how, store.ended.text, store.ranks.get(1).step], ["stopped", "by you", 3]);
  assert.equal(asked.length, 0);
});

test("what was missed is asked for, what comes is shown meanwhile", () => {
  const { store, asked, pass } = watched();
  const run = new FakeRun({ ranks: 1, metrics: 1 });
  store.receive(run.all());
  run.news();
  store.receive(run.news());
  assert.equal(asked.length, 1);
  assert.equal(store.series.get("metric/loss/0").count, 3);
  run.news();
  store.receive(run.news());
  assert.equal(asked.length, 1, "it may still be answered");
  pass(5000);
  run.news();
  store.receive(run.news());
  assert.equal(asked.length, 2);
});

test("news before everything asks for it; everything replaces what there was", () => {
  const { store, asked } = watched();
  const run = new FakeRun({ ranks: 1, metrics: 1 });
  store.receive(run.news());
  assert.equal(asked.length, 1);
  const whole = { x: [1, 3], low: [0.1, 0.3], high: [0.2, 0.3], last: 0.3, count: 3, width: 2 };
  store.receive({ ...run.all(), series: { "metric/loss/0": whole } });
  const series = store.series.get("metric/loss/0");
  assert.deepEqual([series.count, series.width, series.high], [3, 2, [0.2, 0.3]]);
  store.receive(run.news());
  assert.equal(series.count, 6);
  assert.equal(asked.length, 1);
});

test("what is known already is not added twice", () => {
  const { store } = watched();
  const run = new FakeRun({ ranks: 1, metrics: 1 });
  store.receive(run.all());
  const news = run.news();
  store.receive(news);
  store.receive(news);
  assert.equal(store.series.get("metric/loss/0").count, 3);
});

test("listeners are called once a frame, and not after they have gone", () => {
  const { store, frames } = watched();
  const run = new FakeRun({ ranks: 1 });
  let calls = 0;
  const end = store.subscribe(() => (calls += 1));
  store.receive(run.all());
  for (let i = 0; i < 50; i++) store.receive(run.news());
  assert.equal(frames.length, 1);
  frames.shift()();
  assert.equal(calls, 1);
  store.receive(run.news());
  end();
  frames.shift()();
  assert.equal(calls, 1);
});

test("the clock goes on by itself until the run has ended", () => {
  const { store, pass } = watched();
  const run = new FakeRun({ ranks: 1 });
  assert.equal(store.elapsed, 0);
  store.receive({ ...run.all(), now: 10 });
  pass(2500);
  assert.deepEqual([store.elapsed, store.silence], [12.5, 2.5]);
  store.receive({ ...run.end("done"), now: 12 });
  pass(9000);
  assert.deepEqual([store.elapsed, store.silence], [12, 0]);
});

test("the clock stands once the ranks have ended, though their work is not home yet", () => {
  const { store, pass } = watched();
  const run = new FakeRun({ ranks: 1 });
  store.receive({ ...run.all(), now: 10 });
  store.receive({ ...run.news(), now: 12, homeward: true });
  pass(90_000);
  assert.deepEqual([store.elapsed, store.silence, store.over, store.idle], [12, 0, false, true]);
  store.receive({ ...run.all(), now: 12, homeward: true });
  assert.equal(store.idle, true, "as a page that comes later hears it, too");
});

test("what a command came to", () => {
  const { store } = watched();
  store.receive({ kind: "ack", id: "a1", command: "stop", ok: true, text: "stopping" });
  assert.equal(store.acks.get("a1").text, "stopping");
});

test("a thing nobody has heard of changes nothing", () => {
  const { store, frames } = watched();
  store.receive({ kind: "weather", seq: 9 });
  assert.deepEqual([frames.length, store.heard], [0, null]);
});

test("keys become charts, names may have slashes, ranks come in order", () => {
  const series = new Map(
    ["metric/train/loss/10", "metric/train/loss/2", "speed/samples/0", "odd"].map((key) => [key, key]),
  );
  const found = charts(series);
  assert.deepEqual([...found.keys()], ["metric", "speed"]);
  assert.deepEqual(
    [...found.get("metric").get("train/loss")],
    [
      [2, "metric/train/loss/2"],
      [10, "metric/train/loss/10"],
    ],
  );
});
