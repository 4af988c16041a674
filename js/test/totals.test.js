import assert from "node:assert/strict";
import { test } from "node:test";

import { scale, totals } from "../src/totals.js";

const GB = 1e9;
const rank = (memory, rest = {}) => ({ memory, peak: memory, limit: 100 * GB, rate: 10, use: 2, device: "cpu", ...rest });

test("bars are measured against the largest rank while the limit is far away", () => {
  assert.deepEqual(scale([rank(1 * GB), rank(2 * GB, { peak: 3 * GB })]), { of: "largest", whole: 3 * GB });
  assert.deepEqual(scale([rank(1 * GB), rank(26 * GB)]), { of: "limit", whole: null });
  assert.deepEqual(scale([]), { of: "largest", whole: 0 });
});

test("ranks of one machine share its memory, and cards have their own", () => {
  const { rate, memory, limit, use, card } = totals([rank(1 * GB), rank(2 * GB)]);
  assert.deepEqual([rate, memory, limit, use, card], [20, 3 * GB, 100 * GB, 4, null]);
  const cards = [0, 1, 1].map((at) => rank(8 * GB, { device: `cuda:${at}`, reserved: 8 * GB, limit: 16 * GB, card: 0.5 }));
  assert.deepEqual([totals(cards).limit, totals(cards).card], [32 * GB, 0.5], "two of them share a card");
});

test("cards of several machines have the same names", () => {
  const cards = [0, 1, 0, 1].map((at) => rank(8 * GB, { device: `cuda:${at}`, reserved: 8 * GB, limit: 16 * GB }));
  assert.equal(totals(cards, 2).limit, 64 * GB);
  assert.equal(totals([rank(60 * GB), rank(60 * GB)], 2).limit, 200 * GB);
  assert.equal(totals([rank(1 * GB), rank(1 * GB), rank(1 * GB)], 2).limit, 0, "a machine is lost");
});

test("a limit that is not one of all is not given", () => {
  assert.equal(totals([rank(1 * GB), rank(1 * GB, { limit: 9 * GB })]).limit, 0);
  assert.equal(totals([rank(60 * GB), rank(60 * GB)]).limit, 0, "they are on several machines");
});

test("one rank has no total, and what nobody knows is not zero", () => {
  assert.equal(totals([rank(1 * GB)]), null);
  assert.equal(totals([rank(NaN, { rate: null }), rank(NaN, { rate: null })]).rate, null);
});
