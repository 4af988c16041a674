import assert from "node:assert/strict";
import { test } from "node:test";

import { across, late, latest } from "../src/across.js";
import { Series } from "../src/series.js";

const curve = (...values) => {
  const series = new Series();
  values.forEach((y, x) => series.add(x, y));
  return series;
};

test("the mean of ranks, and the band from the lowest to the highest", () => {
  const [a, b] = [
    [1, 2, 3],
    [3, 4, 9],
  ];
  const { mean, low, high } = across([0, 1, 2], [a, b], [a, [5, 4, 9]]);
  assert.deepEqual(
    [mean, low, high],
    [
      [2.5, 3, 6],
      [1, 2, 3],
      [5, 4, 9],
    ],
  );
});

test("a rank that says less often goes straight on in between, so that the mean does not jump", () => {
  const often = [10, 10, 10, 10, 10];
  const seldom = [20, undefined, undefined, undefined, 40];
  assert.deepEqual(across([0, 1, 2, 3, 4], [often, seldom], [often, seldom]).mean, [15, 17.5, 20, 22.5, 25]);
});

test("where no rank says anything the line goes on, and only where all have a gap it has one", () => {
  const [a, b] = [
    [1, undefined, null, null],
    [3, undefined, 4, null],
  ];
  assert.deepEqual(across([0, 1, 2, 3], [a, b], [a, b]).mean, [2, undefined, 4, null]);
});

test("a rank whose news is late keeps its last value, one that has stopped does not", () => {
  const [a, b] = [
    [1, 1, 1],
    [3, undefined, undefined],
  ];
  assert.deepEqual(across([0, 1, 2], [a, b], [a, b], [true, true]).mean, [2, 2, 2]);
  assert.deepEqual(across([0, 1, 2], [a, b], [a, b], [true, false]).mean, [2, 1, 1]);
  const counts = [{ count: 100 }, { count: 80 }, { count: 5 }];
  assert.deepEqual(late(counts), [true, true, false]);
});

test("the last values in a few numbers, and who is not finite", () => {
  const ranks = new Map([
    [0, curve(9, 1)],
    [1, curve(9, 3)],
    [2, curve(1, NaN)],
    [3, curve(1, "Infinity")],
    [4, new Series()],
  ]);
  const { mean, low, high, broken } = latest(ranks);
  assert.deepEqual(
    [mean, low, high, broken],
    [
      2,
      1,
      3,
      [
        [2, NaN],
        [3, Infinity],
      ],
    ],
  );
  assert.equal(latest(new Map([[0, curve(NaN)]])).mean, null);
});

test("what is said of the ranks is of the last step that all have", () => {
  const now = (...lists) => {
    const { mean, low, high, broken } = latest(new Map(lists.map((list, rank) => [rank, curve(...list)])));
    return [mean, low, high, broken];
  };
  assert.deepEqual(now([3, 2, 1], [3, 2]), [2, 2, 2, []]);
  assert.deepEqual(now([3, "-Infinity", 1], [3, 2]), [2, 2, 2, [[0, -Infinity]]]);
  const long = Array.from({ length: 100 }, (_, i) => i);
  assert.deepEqual(now(long, [7]), [53, 7, 99, []], "one that is far behind has its last value");
  const joined = Array.from({ length: 5001 }, (_, i) => i);
  const [, low, high] = now(joined, joined.slice(0, 5000));
  assert.equal(low, high);
});
