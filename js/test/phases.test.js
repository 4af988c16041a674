import assert from "node:assert/strict";
import { test } from "node:test";

import { PHASES, sentence, split } from "../src/phases.js";
import { Series } from "../src/series.js";

const parts = (...ranks) =>
  new Map(ranks.map((one, rank) => [rank, { ...Object.fromEntries(PHASES.map((name) => [name, 0])), ...one }]));

test("the largest part is named, with what may be done about it", () => {
  const said = (...ranks) => sentence(parts(...ranks));
  assert.equal(
    said({ data: 62, forward: 38 }),
    "62 % of a step is waiting for data: raise num_workers of the DataLoader",
  );
  assert.match(said({ forward: 3, backward: 7 }), /^70 % of a step is the backward pass/);
  assert.match(said({ rest: 9, data: 1 }), /^90 % of a step is the rest of the cell/);
  assert.equal(said({ optimizer: 9, data: 1 }), "90 % of a step is the optimizer");
  assert.equal(said({}), "");
  assert.equal(sentence(new Map()), "");
});

test("the rank that the others wait for is named", () => {
  const quick = { forward: 4, communication: 20 };
  const slow = { forward: 4, data: 18, communication: 2 };
  assert.equal(
    sentence(parts(quick, quick, slow)),
    "58 % of a step is communication: the others wait for rank 2, where waiting for data takes 18 ms longer",
  );
  assert.match(sentence(parts(quick, quick)), /communication: larger batches/);
});

test("a step is judged by its last points, gaps left out", () => {
  const series = new Series();
  for (let i = 0; i < 50; i++) series.add(i, i < 40 ? 1000 : 5);
  series.add(50, null);
  const found = split(new Map([["data", new Map([[1, series]])]]));
  assert.deepEqual(found.get(1).data, 5);
  assert.deepEqual(found.get(1).rest, 0);
});
