// Which metrics share a chart, and which charts a heading.

const SPLITS = {
  train: ["train", "training"],
  validation: ["val", "valid", "validation", "eval", "evaluation", "dev"],
  test: ["test", "testing"],
};
const KIND = new Map(Object.entries(SPLITS).flatMap(([kind, words]) => words.map((word) => [word, kind])));
const WORDS = [...KIND.keys()].sort((a, b) => b.length - a.length).join("|");
const BEGINS = new RegExp(`^(${WORDS})[_.\\- ](?=.)`, "i");
const ENDS = new RegExp(`(?<=.)[_.\\- ](${WORDS})$`, "i");

// `val_loss`, `val/loss`, `loss/val` and `epoch/val_loss` are { base: "loss", kind: "validation" }, the last one with
// `epoch/loss` as base; of a name that says nothing of it, kind is "".
export function splitOf(name) {
  const parts = name.split("/");
  const whole = parts.findIndex((part) => KIND.has(part.toLowerCase()));
  if (whole >= 0 && parts.length > 1) {
    const rest = parts.filter((_, i) => i !== whole);
    return { base: rest.join("/"), kind: KIND.get(parts[whole].toLowerCase()) };
  }
  const last = parts.pop();
  const found = last.match(BEGINS) ?? last.match(ENDS);
  if (!found) return { base: name, kind: "" };
  const rest = last.slice(0, found.index) + last.slice(found.index + found[0].length);
  return { base: [...parts, rest].join("/"), kind: KIND.get(found[1].toLowerCase()) };
}

const ORDER = ["", "train", "validation", "test"];

// `names`: name -> its curves. Returns [{ key, title, parts: [{ name, label, curves }] }] in the order the names came;
// what differs only in its split is one chart. The part without a split is the training's, where there are others.
export function metricCharts(names) {
  const found = new Map();
  for (const [name, curves] of names) {
    const { base, kind } = splitOf(name);
    if (!found.has(base)) found.set(base, []);
    found.get(base).push({ name, kind, curves });
  }
  return [...found].map(([key, parts]) => {
    if (parts.length === 1) return { key, title: parts[0].name, parts: [{ ...parts[0], label: "" }] };
    const sorted = [...parts].sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind));
    const twice = (kind) => parts.filter((one) => one.kind === kind).length > 1; // `val_loss` and `eval_loss`
    const label = ({ name, kind }) =>
      twice(kind) ? name : kind || (parts.some((one) => one.kind === "train") ? name : "train");
    return { key, title: key, parts: sorted.map((one) => ({ ...one, label: label(one) })) };
  });
}

export const GROUPED = 12; // so many charts, and they have headings that close

const PLAIN = "metrics"; // the heading of what has no prefix, or one that no other chart has

// Headings in the order their first chart came, after the plain one: [{ title, charts }].
export function grouped(charts) {
  if (charts.length < GROUPED) return [{ title: "", charts }];
  const prefixOf = ({ key }) => key.slice(0, Math.max(0, key.indexOf("/")));
  const count = new Map();
  for (const chart of charts) count.set(prefixOf(chart), (count.get(prefixOf(chart)) ?? 0) + 1);
  const found = new Map([[PLAIN, []]]);
  for (const chart of charts) {
    const prefix = (count.get(prefixOf(chart)) > 1 && prefixOf(chart)) || PLAIN;
    if (!found.has(prefix)) found.set(prefix, []);
    found.get(prefix).push(chart);
  }
  return [...found].filter(([, list]) => list.length).map(([title, list]) => ({ title, charts: list }));
}
