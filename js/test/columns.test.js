import assert from "node:assert/strict";
import { test } from "node:test";

import { columns, first } from "../src/columns.js";
import { Series } from "../src/series.js";

const curve = (points) => {
  const series = new Series();
  for (const [x, y] of points) series.add(x, y);
  return series;
};

test("a few points are drawn where they are", () => {
  const { x, low, high } = columns(
    [
      curve([
        [0, 5],
        [50, 6],
        [100, 7],
      ]),
    ],
    0,
    100,
    300,
  );
  assert.deepEqual(x, [0, 50, 100]);
  assert.deepEqual([low, high], [[[5, 6, 7]], [[5, 6, 7]]]);
});

test("many points are as many columns as there are, with their extremes", () => {
  const many = curve(Array.from({ length: 4000 }, (_, i) => [i, i === 2345 ? 50 : i % 3]));
  const { x, low, high } = columns([many], 0, 3999, 100);
  assert.equal(x.length, 100);
  assert.equal(Math.max(...high[0]), 50);
  assert.ok(low[0].every((value) => value === 0));
});

test("only what is looked at, and one point on each side", () => {
  const line = curve(Array.from({ length: 100 }, (_, i) => [i, i]));
  assert.deepEqual(columns([line], 10.5, 13.5, 100).x, [10, 11, 12, 13, 14]);
});

test("curves share their columns: what one lacks is no gap, what is not known is one", () => {
  const { x, low } = columns(
    [
      curve([
        [0, 1],
        [10, null],
        [20, 3],
      ]),
      curve([
        [0, 4],
        [20, 5],
      ]),
    ],
    0,
    20,
    40,
  );
  assert.deepEqual(x, [0, 10, 20]);
  assert.deepEqual(low, [
    [1, null, 3],
    [4, undefined, 5],
  ]);
});

test("a single point, and none", () => {
  assert.deepEqual(columns([curve([[5, 1]])], 4.5, 5.5, 10).x, [5]);
  assert.deepEqual(columns([curve([])], 0, 1, 10), { x: [], low: [[]], high: [[]], bad: [null] });
});

test("the first of a sorted list", () => {
  const sorted = [1, 2, 2, 3];
  assert.deepEqual([first(sorted, 2, false), first(sorted, 2, true), first(sorted, 0), first(sorted, 9)], [1, 3, 0, 4]);
});
