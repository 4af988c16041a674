import assert from "node:assert/strict";
import { test } from "node:test";

import { edit } from "../src/picker_cell.js";
import { reach, share } from "../src/picker_reach.js";

const LINE = "%%distributed --strategy fsdp";

function after(source) {
  const change = edit(source, LINE, "distributed");
  return change && source.slice(0, change.from) + change.insert + source.slice(change.to);
}

test("the line is put above a loop", () => {
  assert.equal(after("for x in loader:\n    pass"), `${LINE}\nfor x in loader:\n    pass`);
  assert.equal(after(""), `${LINE}\n`);
  assert.equal(after("\n\nx = 1"), `${LINE}\n\n\nx = 1`);
});

test("a line of nbtrain's own is replaced, whatever it said", () => {
  assert.equal(after("%%distributed -s ddp -d 2\nx = 1"), `${LINE}\nx = 1`);
  assert.equal(after("%%distributed"), LINE);
  assert.equal(after("\n  %%distributed -s ddp\nx = 1"), `\n${LINE}\nx = 1`);
  assert.equal(after("x = '''\n%%distributed\n'''"), `${LINE}\nx = '''\n%%distributed\n'''`);
});

test("it goes below what may stand above it", () => {
  assert.equal(after("%%time\nx = 1"), `%%time\n${LINE}\nx = 1`);
  assert.equal(after("%%time"), `%%time\n${LINE}\n`);
  assert.equal(after("%%time\n%%distributed -s ddp\nx = 1"), `%%time\n${LINE}\nx = 1`);
});

test("a cell of another magic is left alone", () => {
  assert.equal(after("%%bash\nls"), null);
  assert.equal(after("%%distributed_other\nx"), null);
  assert.equal(after("\n%%bash\nls"), null);
  assert.equal(after("%%time\n%%html\n<b>"), null);
});

test("another name of the magic", () => {
  assert.deepEqual(edit("%%nbtrain -d 2\nx", "%%nbtrain -d 4", "nbtrain"), { from: 0, to: 14, insert: "%%nbtrain -d 4" });
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
