// The last runs of a notebook, from the history, in a disclosure.

import { element } from "./dom.js";
import { duration, whole } from "./format.js";

const HEADS = ["run", "when", "cell", "strategy", "ranks", "steps", "took", "ended"];
const NUMBERS = new Set(["run", "ranks", "steps", "took"]);
const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export function earlier(runs) {
  const cell = (tag, name, value) => element(tag, { class: NUMBERS.has(name) ? "nbt-n" : "" }, value);
  const rows = runs.map((run) => {
    const values = row(run);
    return element("tr", {}, ...HEADS.map((name, i) => cell("td", name, values[i])));
  });
  const head = element("tr", {}, ...HEADS.map((name) => cell("th", name, name)));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  const box = element("div", { class: "nbt-table", tabindex: 0, role: "region", "aria-label": "earlier runs" }, table);
  return element("details", { class: "nbt-earlier" }, element("summary", {}, title(runs)), box);
}

const title = (runs) => `Last ${runs.length === 1 ? "run" : `${runs.length} runs`}: ${runs[0].how}, ${when(runs[0])}`;

const when = (run) => WHEN.format(new Date(1000 * run.began));

const row = (run) => [
  String(run.number),
  when(run),
  run.cell ? `[${run.cell}]` : "",
  run.strategy,
  String(run.ranks),
  run.steps ? whole(run.steps) : "",
  duration(run.seconds),
  [run.how, run.text].filter(Boolean).join(": "),
];
