import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { dragged, scaled, shifted } from "../src/axis.js";
import { runs } from "../src/bad_marks.js";
import { csv } from "../src/csv.js";
import { CurveSettings, rankColour, rankDash } from "../src/curve_settings.js";
import { Curves } from "../src/curves.js";
import { metric } from "../src/format.js";
import { floored, least, logTicks, positive } from "../src/log_scale.js";
import { grouped, metricCharts, splitOf } from "../src/metric_charts.js";
import { Series } from "../src/series.js";
import { smoothed } from "../src/smoothing.js";

const curve = (values, width = 1) => {
  const series = new Series();
  values.forEach((y, i) => series.add(width * i, y));
  return series;
};

// ---------------------------------------------------------------- train and validation

// The saved picture's tests read them, too.
const NAMES = JSON.parse(readFileSync(new URL("metric_names.json", import.meta.url), "utf8"));

for (const [name, base, kind] of NAMES) {
  test(`${name} is ${kind || "nothing but itself"}${kind && ` of ${base}`}`, () => {
    assert.deepEqual(splitOf(name), { base, kind });
  });
}

const arranged = (...names) =>
  metricCharts(new Map(names.map((name) => [name, name]))).map(({ title, parts }) => [
    title,
    ...parts.map(({ name, label }) => `${name}: ${label}`),
  ]);

test("train and validation of one name are one chart", () => {
  assert.deepEqual(arranged("val_loss", "loss", "lr", "train/acc", "val/acc"), [
    ["loss", "loss: train", "val_loss: validation"],
    ["lr", "lr: "],
    ["acc", "train/acc: train", "val/acc: validation"],
  ]);
  assert.deepEqual(arranged("val_loss"), [["val_loss", "val_loss: "]]);
});

test("parts that would have the same label have their names", () => {
  assert.deepEqual(arranged("loss", "train_loss", "val_loss", "eval_loss"), [
    ["loss", "loss: loss", "train_loss: train", "val_loss: val_loss", "eval_loss: eval_loss"],
  ]);
});

test("from twelve charts on they have headings by their prefix", () => {
  const many = (count) => Array.from({ length: count }, (_, i) => ({ key: i % 2 ? `grad/${i}` : `${i}` }));
  assert.deepEqual(
    grouped(many(11)).map(({ title }) => title),
    [""],
  );
  assert.deepEqual(
    grouped(many(12)).map(({ title, charts }) => [title, charts.length]),
    [
      ["metrics", 6],
      ["grad", 6],
    ],
  );
  assert.deepEqual(
    grouped([...many(12), { key: "<b>x</b>" }]).map(({ title, charts }) => [title, charts.length]),
    [
      ["metrics", 7],
      ["grad", 6],
    ],
    "a prefix with one chart is no group",
  );
  assert.deepEqual(
    grouped([...many(12), { key: "metrics/a" }, { key: "metrics/b" }]).map(({ title, charts }) => [title, charts.length]),
    [
      ["metrics", 8],
      ["grad", 6],
    ],
    "of one name there is one heading",
  );
});

// ---------------------------------------------------------------- smoothing

test("the average is TensorBoard's: the first value is itself, a constant stays", () => {
  const ys = [4, 2, 8, 8, 1];
  const weight = 0.6;
  let [last, count] = [0, 0];
  const expected = ys.map((y) => {
    last = last * weight + (1 - weight) * y;
    return last / (1 - weight ** ++count);
  });
  smoothed(curve(ys), weight).low.forEach((value, i) => assert.ok(Math.abs(value - expected[i]) < 1e-12));
  assert.deepEqual(
    smoothed(curve([3, 3, 3]), 0.9).low.map((value) => Math.round(1e9 * value) / 1e9),
    [3, 3, 3],
  );
});

test("a gap stays one, and what comes after it goes on from before", () => {
  const [a, gap, b] = smoothed(curve([1, NaN, 3]), 0.5).low;
  assert.deepEqual([a, gap], [1, null]);
  assert.ok(b > 1 && b < 3);
});

test("a long curve is smoothed as a thousand of its points would be, and has no more than twice as many", () => {
  const wave = (count) => smoothed(curve(Array.from({ length: count }, (_, i) => Math.sin((20 * i) / count))), 0.9);
  const [few, many] = [wave(1000), wave(4000)];
  assert.deepEqual([few.x.length, many.x.length], [1000, 2000]);
  for (let i = 0; i < 1000; i += 50) {
    assert.equal(many.x[2 * i], 4 * few.x[i]);
    assert.ok(Math.abs(few.low[i] - many.low[2 * i]) < 0.05, `${i}: ${few.low[i]} ${many.low[2 * i]}`);
  }
});

// ---------------------------------------------------------------- log scale

test("a log scale leaves out what it has no place for, and does not invent it", () => {
  assert.deepEqual(positive([1, 0, -2, null, undefined, 3]), [1, null, null, null, undefined, 3]);
  assert.equal(least([[0, -1], [null, 0.5, undefined], [2]]), 0.5);
  assert.equal(least([[0]]), null);
  assert.deepEqual(floored([-1, 0.5, -3, null], [2, 2, -1, null], 0.1), [0.1, 0.5, null, null]);
});

test("the labels of a log scale are round, few, and inside", () => {
  assert.deepEqual(logTicks(0.001, 1000, 7), [0.001, 0.01, 0.1, 1, 10, 100, 1000]);
  assert.deepEqual(logTicks(0.9, 110, 8), [1, 2, 5, 10, 20, 50, 100]);
  assert.deepEqual(logTicks(0.4, 1.3, 5), [0.4, 0.6, 0.8, 1, 1.2]);
  for (const [low, high] of [
    [1e-12, 1e9],
    [0.3, 2.9],
    [5, 5.001],
    [1e-300, 1e300],
  ]) {
    const found = logTicks(low, high, 5);
    assert.ok(found.length > 0 && found.length <= 6, `${found}`);
    assert.ok(
      found.every((tick) => tick >= low && tick <= high),
      `${low} ${high}: ${found}`,
    );
  }
});

// ---------------------------------------------------------------- what a chart draws and says

const theme = { rank: (i) => `#00000${i % 8}`, dash: () => [2, 2] };
function curves(settings, ...parts) {
  const made = new Curves({ theme, settings, word: metric });
  made.take(
    parts.map(([name, label, ...ranks]) => ({
      name,
      label,
      curves: new Map(ranks.map((one, rank) => [rank, curve(one)])),
    })),
  );
  return made;
}

const drawn = (made) => {
  const { data } = made.data(...made.extent(), 100);
  return Object.fromEntries(made.series().map(({ label }, i) => [label, data[i + 1]]));
};

test("by default ranks are a mean in a band; a chosen one has a line", () => {
  const settings = new CurveSettings();
  const made = curves(settings, ["loss", "", [4, 2], [2, 1], [3, 0]]);
  assert.deepEqual(drawn(made), { "loss high": [4, 2], "loss low": [2, 0], "loss mean": [3, 1] });
  assert.deepEqual(made.legend(), [{ colour: null, name: "", value: "now 1 (0–2 across ranks)", tone: undefined }]);
  settings.toggle(1);
  assert.deepEqual(drawn(made)["loss rank 1"], [2, 1]);
  settings.toggle(1);
  assert.ok(!("loss rank 1" in drawn(made)));
});

test("one rank is a plain line", () => {
  const made = curves(new CurveSettings(), ["loss", "", [4, 2]]);
  made.settings.toggle(0);
  assert.deepEqual(drawn(made), { "loss high": [4, 2], "loss low": [4, 2], "loss mean": [4, 2] });
  assert.equal(made.legend()[0].value, "now 2");
});

test("what is not finite is said with its rank, marked where it came, and not forgotten", () => {
  const [bad, later] = [
    [4, NaN],
    [NaN, 3],
  ];
  const made = curves(new CurveSettings(), ["loss", "", [4, 2], bad, [3, 1]]);
  assert.deepEqual(made.legend()[0], {
    colour: null,
    name: "",
    value: "now NaN on rank 1, others 1.5 (1–2 across ranks)",
    tone: "bad",
  });
  assert.deepEqual(made.data(0, 1, 100).bad, [[1, 1]]);
  assert.deepEqual(
    [0, 1].map((at) => made.legend(at)[0].value),
    ["3.667 (3–4 across ranks)", "1.5 (1–2 across ranks) · NaN"],
  );
  const over = curves(Object.assign(new CurveSettings(), { over: true }), ["loss", "", later]);
  assert.equal(over.legend()[0].value, "last 3 · there was NaN");
  over.data(0, 1, 100);
  assert.equal(over.legend(0)[0].value, "NaN", "not what is beside it");
  const infinite = curves(new CurveSettings(), ["loss", "", ["Infinity"], ["Infinity"]]);
  assert.equal(infinite.legend()[0].value, "now inf on all ranks");
});

test("a smoothed line lies over the raw one", () => {
  const made = curves(Object.assign(new CurveSettings(), { smoothing: 0.5 }), ["loss", "", [4, 0, 4]]);
  const found = drawn(made);
  assert.deepEqual(found["loss mean raw"], [4, 0, 4]);
  assert.deepEqual(
    found["loss mean"].map((y) => Math.round(100 * y) / 100),
    [4, 1.33, 2.86],
  );
  assert.deepEqual(found["loss high"], [4, 0, 4]);
});

test("a log scale says that it leaves something out", () => {
  const made = curves(Object.assign(new CurveSettings(), { log: true }), ["gap", "", [4, 0, 1]]);
  assert.deepEqual(drawn(made)["gap mean"], [4, null, 1]);
  assert.ok(made.legend().some(({ value }) => value === "values ≤ 0 are not on a log scale"));
});

test("an earlier run is a line of its own, as far as it went", () => {
  const past = { title: "run 3", curves: new Map([["loss", curve([5, 4, 3, 2])]]) };
  const made = curves(Object.assign(new CurveSettings(), { past }), ["loss", "", [4, 2], [2, 0]], ["lr", "", [1]]);
  assert.deepEqual(made.extent(), [0, 3]);
  assert.deepEqual(drawn(made)["loss past"], [5, 4, 3, 2]);
  assert.ok(!("lr past" in drawn(made)));
  assert.equal(made.legend().at(-1).value, "last 2");
  assert.equal(made.legend(1).at(-1).value, "4");
});

test("where neighbours are joined, only what differs between ranks is said to be across them", () => {
  const steep = Array.from({ length: 1000 }, (_, step) => step);
  const same = curves(new CurveSettings(), ["lr", "", steep, steep]);
  same.data(0, 999, 10);
  assert.equal(same.legend(0)[0].value, "49.5");
  const other = curves(new CurveSettings(), ["lr", "", steep, steep.map((y) => y + 10)]);
  other.data(0, 999, 10);
  assert.equal(other.legend(0)[0].value, "54.5 (49.5–59.5 across ranks)");
});

test("beside the cursor: the mean, and which ranks are at the ends of the band", () => {
  const made = curves(new CurveSettings(), ["loss", "", [4, 2], [2, 1], [3, 0]]);
  drawn(made);
  assert.deepEqual(
    made.rows(1).map(({ name, value }) => [name, value]),
    [
      ["mean", "1"],
      ["lowest rank 2, highest rank 0", ""],
    ],
  );
});

test("beside the cursor: what a smoothed line is there, too", () => {
  const settings = new CurveSettings();
  settings.change({ smoothing: 0.5 });
  const made = curves(settings, ["loss", "", [4, 2, 0]]);
  drawn(made);
  assert.deepEqual(
    made.rows(2).map(({ value }) => value),
    ["0, smoothed 1.143"],
  );
});

test("ranks look different from each other, and from the mean", () => {
  const looks = { rank: (i) => i, dash: (i) => i };
  const found = new Set(Array.from({ length: 49 }, (_, rank) => `${rankColour(looks, rank)} ${rankDash(looks, rank)}`));
  assert.equal(found.size, 49);
  assert.ok([...found].every((look) => !look.startsWith("0 ") && !look.endsWith(" 0")));
});

// ---------------------------------------------------------------- zoom

test("a part is scaled around a place, moved, and never leaves what there is", () => {
  assert.deepEqual(scaled([0, 100], 0.5, 50, [0, 100]), [25, 75]);
  assert.deepEqual(scaled([0, 100], 0.5, 100, [0, 100]), [50, 100]);
  assert.equal(scaled([25, 75], 2, 50, [0, 100]), null);
  assert.deepEqual(shifted([20, 40], 0.5, [0, 100]), [30, 50]);
  assert.deepEqual(shifted([70, 90], 1, [0, 100]), [80, 100]);
});

test("what is under the fingers stays under them", () => {
  assert.deepEqual(dragged([20, 40], [100], [50], 200, [0, 100]), [25, 45]);
  assert.deepEqual(dragged([0, 100], [50, 150], [0, 200], 200, [0, 100]), [25, 75]);
  assert.equal(dragged([25, 75], [0, 200], [50, 150], 200, [0, 100]), null);
  assert.deepEqual(dragged([0, 50], [50, 150], [150, 50], 200, [0, 100]), [0, 50]);
});

// ---------------------------------------------------------------- copied, marked

test("curves as CSV: a row for each x, and the ends of what was joined", () => {
  const joined = Series.from({ x: [0, 2], low: [1, 3], high: [2, 5], last: 5, count: 4, width: 2 });
  const text = csv("step", [
    { name: "loss, mine", series: curve([4, NaN]) },
    { name: "acc", series: joined },
  ]);
  assert.equal(text, 'step,"loss, mine",acc,acc lowest,acc highest\n0,4,1.5,1,2\n1,NaN,,,\n2,,4,3,5\n');
});

test("neighbours are one mark", () => {
  assert.deepEqual(runs([1, 2, 3, 7, 9, 10]), [
    [1, 3],
    [7, 7],
    [9, 10],
  ]);
});
