import assert from "node:assert/strict";
import { test } from "node:test";

import { completed, words } from "../src/magic_line.js";
import { edit, write } from "../src/picker_cell.js";
import { reach, share } from "../src/picker_reach.js";

const LINE = "%%distributed --strategy fsdp --devices 2";
const FLAGS = Object.fromEntries(
  ["strategy", "devices", "precision", "keep", "split_batches", "keep_last"].map((name) => [
    `--${name.replaceAll("_", "-")}`,
    name,
  ]),
);
Object.assign(FLAGS, { "-s": "strategy", "-d": "devices" });

const after = (source) => edit(source, LINE, "distributed", FLAGS);

test("a line of nbtrain's own is replaced, and keeps the options that are not chosen in the picker", () => {
  assert.equal(
    after("%%distributed --devices 2 --precision bf16-mixed --keep losses\nx = 1"),
    `${LINE} --precision bf16-mixed --keep losses\nx = 1`,
  );
  assert.equal(after("%%distributed -s zero1 --bucket-mb 5 -d=4 --split-batches\nx"), `${LINE} --split-batches\nx`);
  assert.equal(after("%%distributed --keep a --keep_last 2  # why"), `${LINE} --keep a --keep_last 2 # why`);
  assert.equal(after("%%distributed"), LINE);
  assert.equal(after("\n  %%distributed -s ddp\nx = 1"), `\n${LINE}\nx = 1`);
  assert.equal(after("%%time\n%%distributed -s ddp\nx = 1"), `%%time\n${LINE}\nx = 1`);
});

test("an empty cell gets the line", () => {
  assert.equal(after(""), `${LINE}\n`);
  assert.equal(after("\n \n"), `${LINE}\n`);
});

test("other cells are left alone", () => {
  for (const source of [
    "# plain cell\nprint('mine')",
    "%distributed",
    "%%bash\nls",
    "%%distributed_other\nx",
    "%%time\nx = 1",
    "%%time",
    "x = '''\n%%distributed\n'''",
  ]) {
    assert.equal(after(source), null);
  }
});

test("another name of the magic", () => {
  assert.equal(edit("%%nbtrain -d 2\nx", "%%nbtrain -d 4", "nbtrain", FLAGS), "%%nbtrain -d 4\nx");
});

test("what is quoted or in brackets is one word", () => {
  assert.deepEqual(words(`--keep "a b" -d [0, (1, 2)] '#' # why -d 3 `), [
    "--keep",
    '"a b"',
    "-d",
    "[0, (1, 2)]",
    "'#'",
    "# why -d 3",
  ]);
  assert.equal(completed("--devices 4", '-d "0, 1" --keep "a --devices b"', FLAGS), '--devices 4 --keep "a --devices b"');
});

// [how it was written, the cells then]
function written(at, ...sources) {
  const cells = sources.map((source) => ({
    cell_type: source.startsWith("#") ? "markdown" : "code",
    source,
    getSource() {
      return this.source;
    },
    setSource(changed) {
      this.source = changed;
    },
  }));
  const insertCell = (index, cell) => cells.splice(index, 0, cell);
  return [write({ cells, insertCell }, at, LINE, "distributed", FLAGS), cells.map(({ source }) => source)];
}

test("where the next cell is another's, a new one comes between", () => {
  assert.deepEqual(written(0, "pick", "print(1)"), ["new", ["pick", LINE, "print(1)"]]);
  assert.deepEqual(written(0, "pick", "# words", "print(1)"), ["new", ["pick", "# words", LINE, "print(1)"]]);
  assert.deepEqual(written(1, "x", "pick", "%%distributed\ny"), ["next", ["x", "pick", `${LINE}\ny`]]);
  assert.deepEqual(written(1, "x", "pick", "# words"), ["none", ["x", "pick", "# words"]]);
});

const needing = (peak, room) => ({ memory: { peak }, room });

test("a bar's width is what a rank may use, or what is needed where that is more", () => {
  assert.equal(reach(needing(257e3, 8.12e9), []), 8.12e9);
  assert.equal(reach(needing(100, 40), []), 100);
});

test("where nobody knows what a rank may use, bars are compared with the largest", () => {
  const cards = [needing(100, null), needing(50, null), { memory: null, room: null }];
  assert.equal(reach(cards[1], cards), 100);
});

test("a small share is no whole percent", () => {
  assert.equal(share(257e3, 8.12e9), "< 1 %");
  assert.equal(share(36.2, 40), "91 %");
  assert.equal(share(1, 100), "1 %");
  assert.equal(share(113, 40), "283 %");
});
