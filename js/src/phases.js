// What a step is made of: in words, and where its time goes.

import { milliseconds, percent } from "./format.js";

export const NAMES = {
  data: "data",
  forward: "forward",
  backward: "backward",
  communication: "communication",
  optimizer: "optimizer",
  rest: "rest of the cell",
};
const WHERE = { data: "waiting for data", rest: "the rest of the cell" }; // in a sentence
export const PHASES = Object.keys(NAMES);

const LATELY = 8; // points; a single step says little
const UNEVEN = 0.2; // of a step: so much less has a rank to wait for the others than they for it

// `phases`: name -> rank -> Series. Returns rank -> { name: milliseconds per step, lately }.
export function split(phases) {
  const found = new Map();
  for (const name of PHASES) {
    for (const [rank, series] of phases.get(name) ?? []) {
      if (!found.has(rank)) found.set(rank, Object.fromEntries(PHASES.map((each) => [each, 0])));
      found.get(rank)[name] = lately(series);
    }
  }
  return new Map([...found].sort(([a], [b]) => a - b));
}

function lately({ low, high }) {
  let [sum, count] = [0, 0];
  for (let i = Math.max(0, low.length - LATELY); i < low.length; i++) {
    if (low[i] === null) continue;
    sum += (low[i] + high[i]) / 2;
    count += 1;
  }
  return count ? sum / count : 0;
}

export const total = (parts) => PHASES.reduce((sum, name) => sum + parts[name], 0);

// One sentence about the largest part, with what may be done about it; empty while nothing is known.
export function sentence(parts) {
  const ranks = [...parts.values()];
  const means = Object.fromEntries(PHASES.map((name) => [name, mean(ranks.map((one) => one[name]))]));
  const step = total(means);
  if (!(step > 0)) return "";
  const largest = PHASES.reduce((best, name) => (means[name] > means[best] ? name : best));
  const share = percent(means[largest] / step);
  switch (largest) {
    case "data":
      return `${share} of a step is waiting for data: raise num_workers of the DataLoader`;
    case "communication":
      return `${share} of a step is communication: ${slow(parts, step) || "larger batches make it rarer"}`;
    case "optimizer":
      return `${share} of a step is the optimizer`;
    case "rest":
      return `${share} of a step is the rest of the cell, such as printing or .item()`;
    default:
      return `${share} of a step is the ${largest} pass: the time goes into the model`;
  }
}

// Of the rank that the others wait for, if there is one.
function slow(parts, step) {
  if (parts.size < 2) return "";
  const [[rank, own], ...others] = [...parts].sort(([, a], [, b]) => a.communication - b.communication);
  const typical = (name) => mean(others.map(([, one]) => one[name]));
  if (typical("communication") - own.communication < UNEVEN * step) return "";
  const longer = (name) => own[name] - typical(name);
  const names = PHASES.filter((name) => name !== "communication");
  const most = names.reduce((best, name) => (longer(name) > longer(best) ? name : best));
  if (!(longer(most) > 0)) return `the others wait for rank ${rank}`;
  return `the others wait for rank ${rank}, where ${WHERE[most] ?? most} takes ${milliseconds(longer(most))} longer`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
