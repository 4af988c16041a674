import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";

import { ServerList } from "../src/server_list.js";

const SERVER = { base: "/", headers: {}, token: "" };

afterEach(() => {
  mock.restoreAll();
  mock.timers.reset();
});

const settled = async () => {
  for (let i = 0; i < 20; i++) await Promise.resolve();
};

// Each question is answered by hand: `answers[i](body)`, or by nobody.
function asked() {
  const answers = [];
  mock.method(globalThis, "fetch", (url, { signal }) => {
    return new Promise((resolve, reject) => {
      answers.push((body) => resolve({ status: 200, json: async () => body }));
      signal.addEventListener("abort", () => reject(signal.reason));
    });
  });
  let over = 0;
  const list = new ServerList("nbtrain/api/runs", () => over++, () => SERVER);
  return { list, answers, over: () => over };
}

test("what the server told stays when it tells no list, or is too late", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const { list, answers, over } = asked();
  list.ask();
  answers[0]([1, 2]);
  await settled();
  list.ask();
  answers[1]({ message: "Forbidden" });
  await settled();
  list.ask();
  mock.timers.tick(59_000);
  await settled();
  assert.equal(over(), 2, "the first time there are many files to read");
  mock.timers.tick(2_000);
  await settled();
  assert.deepEqual([list.items, over()], [[1, 2], 3]);
  list.ask();
  answers[3]([]);
  await settled();
  assert.deepEqual(list.items, []);
});

test("one question at a time, and another one when there was news meanwhile", async () => {
  const { list, answers } = asked();
  for (let i = 0; i < 5; i++) list.ask();
  await settled();
  assert.equal(answers.length, 1);
  answers[0](["before"]);
  await settled();
  assert.equal(answers.length, 2, "what was told began before the last news");
  answers[1](["after"]);
  await settled();
  assert.deepEqual([answers.length, list.items], [2, ["after"]]);
});

test("a page without a server asks nobody", async () => {
  mock.method(globalThis, "fetch", () => assert.fail());
  await new ServerList("api/sessions", () => assert.fail(), () => null).ask();
});
