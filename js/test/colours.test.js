import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Theme } from "../src/theme.js";

const sheet = readFileSync(new URL("../src/style.css", import.meta.url), "utf8");
const block = (selector) => sheet.slice(sheet.indexOf(selector)).match(/\{[^}]*\}/)[0];
const variables = (css) =>
  Object.fromEntries([...css.matchAll(/--nbt-([\w-]+): (#\w+);/g)].map(([, name, value]) => [name, value]));

const LIGHT = { grounds: ["#ffffff", "#f5f5f5"], colours: variables(block(".nbt-root {")), dark: false };
const DARK = {
  grounds: ["#111111", "#1e1e1e", "#212121"],
  colours: variables(block(".nbt-root.nbt-dark")),
  dark: true,
};
const PHASES = ["data", "forward", "backward", "communication", "optimizer", "rest"];

function luminance(colour) {
  const full = colour.length === 4 ? colour.replace(/#(.)(.)(.)/, "#$1$1$2$2$3$3") : colour;
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = parseInt(full.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

for (const { grounds, colours, dark } of [LIGHT, DARK]) {
  const look = (member, ...given) => Theme.prototype[member].call({ dark }, ...given);

  test(`words can be read on ${dark ? "dark" : "light"} ground`, () => {
    for (const name of ["soft", "busy", "wait", "good", "bad"]) {
      for (const ground of grounds) assert.ok(contrast(colours[name], ground) >= 4.5, `${name} on ${ground}`);
    }
    for (const name of PHASES) assert.ok(contrast(colours["on-phase"], colours[name]) >= 4.5, `the share of ${name}`);
  });

  test(`curves can be seen on ${dark ? "dark" : "light"} ground, and are like their legend`, () => {
    for (let rank = 0; rank < 8; rank++) {
      for (const ground of grounds) assert.ok(contrast(look("rank", rank), ground) >= 3, `rank ${rank} on ${ground}`);
    }
    for (const name of PHASES) assert.equal(look("phase", name), colours[name]);
  });
}
