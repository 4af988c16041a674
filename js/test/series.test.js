import assert from "node:assert/strict";
import { test } from "node:test";

import { INF, MINUS_INF, NAN, notFinite, Series } from "../src/series.js";

test("a short curve is kept as it is", () => {
  const series = new Series();
  [3, 1, 2].forEach((y, i) => series.add(10 * i, y));
  assert.deepEqual(
    [series.x, series.low, series.high],
    [
      [0, 10, 20],
      [3, 1, 2],
      [3, 1, 2],
    ],
  );
  assert.deepEqual([series.last, series.count, series.width], [2, 3, 1]);
});

test("a million points stay few, and no spike is lost", () => {
  const series = new Series(256);
  for (let i = 0; i < 1_000_000; i++) series.add(i, i === 123_456 ? 99 : i === 777_777 ? -99 : Math.sin(i));
  assert.ok(series.length < 256 && series.length >= 128);
  assert.equal(Math.max(...series.high), 99);
  assert.equal(Math.min(...series.low), -99);
  assert.equal(series.count, 1_000_000);
});

// By hand: bucket i holds the points from i * width on.
for (const count of [1, 7, 8, 9, 15, 16, 17, 63, 100, 1001]) {
  test(`the buckets of ${count} points are those of their neighbours`, () => {
    const ys = Array.from({ length: count }, (_, i) => (i * 7919) % 101);
    const series = new Series(8);
    ys.forEach((y, i) => series.add(i, y));
    const parts = series.x.map((_, i) => ys.slice(i * series.width, (i + 1) * series.width));
    assert.equal(parts.flat().length, count);
    assert.deepEqual(
      series.x,
      parts.map((_, i) => i * series.width),
    );
    assert.deepEqual(
      series.low,
      parts.map((part) => Math.min(...part)),
    );
    assert.deepEqual(
      series.high,
      parts.map((part) => Math.max(...part)),
    );
  });
}

test("what is not finite is a gap, and is known to have come last", () => {
  const series = new Series(4);
  for (const [x, y] of [1, null, NaN, Infinity].map((y, x) => [x, y])) series.add(x, y);
  assert.deepEqual(series.low, [1, null]);
  assert.equal(series.last, Infinity);
  series.add(4, 5);
  series.add(5, null);
  assert.deepEqual(
    [series.low, series.high],
    [
      [1, null, 5],
      [1, null, 5],
    ],
  );
});

test("which values were not finite is kept, however many neighbours are joined", () => {
  const series = new Series(4);
  [1, "NaN", 2, "Infinity", 3, 4, "-Infinity", 5].forEach((y, x) => series.add(x, y));
  assert.deepEqual(series.bad, [NAN | INF, MINUS_INF]);
  assert.equal(notFinite(series.spoilt), "NaN and inf and -inf");
  const { x, low, high, bad, last, count, width } = series;
  assert.deepEqual(Series.from({ x, low, high, bad, last, count, width }, 4), series);
});

for (const count of [0, 1, 5, 8, 13, 100]) {
  test(`a curve of ${count} points goes on where its message left off`, () => {
    const one = new Series(8);
    for (let i = 0; i < count; i++) one.add(i, (i * 31) % 17);
    const { x, low, high, last, width } = one;
    const other = Series.from(JSON.parse(JSON.stringify({ x, low, high, last, count, width })), 8);
    for (let i = count; i < 3 * count + 9; i++) for (const series of [one, other]) series.add(i, (i * 31) % 17);
    assert.deepEqual(other, one);
  });
}
