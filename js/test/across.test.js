import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { across, late, latest } from "../src/across.js";
import { columns } from "../src/columns.js";
import { Series } from "../src/series.js";

const curve = (...values) => {
  const series = new Series();
  values.forEach((y, x) => series.add(x, y));
  return series;
};

// The saved picture's tests read the same.
const CASES = JSON.parse(readFileSync(new URL("across.json", import.meta.url), "utf8"));

for (const { what, curves, ...expected } of CASES) {
  test(`ranks as one curve: ${what}`, () => {
    const list = curves.map(([xs, ys]) => {
      const series = new Series();
      xs.forEach((x, i) => series.add(x, ys[i]));
      return series;
    });
    const last = Math.max(0, ...list.map((one) => one.x.at(-1)));
    const { x, low, high } = columns(list, 0, last, 1000); // wide enough that each point has a column
    assert.deepEqual({ x, ...across(x, low, high, late(list)) }, expected);
  });
}

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
