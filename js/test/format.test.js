import assert from "node:assert/strict";
import { test } from "node:test";

import { duration, metric, milliseconds, percent, place, quantity, share, size } from "../src/format.js";

// [what, arguments and words]: the same words as nbtrain.humanize and nbtrain.views.base.
const WORDS = [
  [
    size,
    [0, "0 B"],
    [999, "999 B"],
    [1000, "1 kB"],
    [310e6, "310 MB"],
    [1.23e9, "1.23 GB"],
    [25.2e9, "25.2 GB"],
    [3e12, "3 TB"],
  ],
  [duration, [0, "0:00"], [42.4, "0:42"], [42.6, "0:43"], [723, "12:03"], [3723, "1:02:03"], [-1, "0:00"]],
  [quantity, [0, "0"], [0.5203, "0.52"], [28.14, "28.1"], [99.96, "100"], [3600, "3,600"], [0.00001234, "1.23e-05"]],
  [
    metric,
    [0.123456, "0.1235"],
    [12345.6, "1.235e+04"],
    [-2, "-2"],
    [1e-7, "1e-07"],
    [null, "NaN"],
    [NaN, "NaN"],
    [Infinity, "inf"],
    [-Infinity, "-inf"],
  ],
  [percent, [0.617, "62 %"], [0, "0 %"]],
  [milliseconds, [0, "0 ms"], [0.21, "210 µs"], [42.04, "42 ms"], [1300, "1.3 s"]],
];

for (const [word, ...cases] of WORDS) {
  test(word.name, () => {
    for (const [value, words] of cases) assert.equal(word(value), words);
  });
}

test("place", () => {
  assert.equal(place({ epoch: 2, done: 340, total: 1200, left: 42 }), "epoch 2 · 340/1200 · 28 % · 0:42 left");
  assert.equal(place({ epoch: 2, done: 1200, total: 1200, left: 0 }), "epoch 2 · 1200/1200 · 100 %");
  assert.equal(place({ epoch: 1, done: 7, total: null, left: null }), "epoch 1 · batch 7");
  const of = { epoch: 2, epochs: 8, done: 3, total: 40, left: 9 };
  assert.equal(place(of), "epoch 2 of 8 · 3/40 · 13 % · 0:09 left");
  assert.equal(place({ ...of, stage: "validation" }), "epoch 2 of 8 · validation 3/40 · 7 % · 0:09 left");
  const trained = { ...of, stage: "validation", trained: 0.2499 };
  assert.equal(place({ ...trained, left: 60 }), "epoch 2 of 8 · validation 3/40 · 24 % · 1:00 left");
  assert.deepEqual([share(trained), share({ ...trained, done: 40 }), share({ ...of, stage: "validation" })], [0.2499, 0.2499, 3 / 40]);
  assert.equal(place({ ...of, stage: "test", left: null }), "test 3/40 · 7 %");
  assert.equal(place({ ...of, stage: "predict", total: null }), "predict batch 3");
});
