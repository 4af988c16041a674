// What a chart of curves says: "now 0.70 (0.66–0.83 across ranks)".

import { latest } from "./across.js";
import { notFinite } from "./series.js";

const LISTED = 4; // so many ranks are named

// Of the last values; `curves`: rank -> Series, `word(y)` names a value, `over`: the run has ended. { text, tone }.
export function nowWords(curves, word, over) {
  const { ranks, mean, low, high, broken } = latest(curves);
  if (!ranks) return { text: "" };
  const when = over ? "last" : "now";
  if (broken.length) {
    const rest = mean === null ? "" : `, others ${spread(word, mean, low, high, ranks - broken.length)}`;
    return {
      text: `${when} ${word(broken[0][1])}${whichRanks(
        broken.map(([rank]) => rank),
        ranks,
      )}${rest}`,
      tone: "bad",
    };
  }
  const text = `${when} ${spread(word, mean, low, high, ranks)}`;
  const ever = [...curves.values()].reduce((all, one) => all | one.spoilt, 0);
  return ever ? { text: `${text} · there was ${notFinite(ever)}`, tone: "bad" } : { text };
}

// Of one place; `bits`: what came there that is not finite.
export function thereWords(word, mean, low, high, ranks, bits) {
  const tone = bits ? "bad" : undefined;
  if (typeof mean !== "number") return { text: notFinite(bits) || "–", tone };
  const text = spread(word, mean, low, high, ranks);
  return { text: bits ? `${text} · ${notFinite(bits)}` : text, tone };
}

// Of one rank the ends are those of joined neighbours.
function spread(word, mean, low, high, ranks) {
  const ends = range(word, low, high);
  if (word(low) === word(high)) return word(mean);
  return `${word(mean)} (${ends}${ranks > 1 ? " across ranks" : ""})`;
}

export function range(word, low, high) {
  const [least, most] = [word(low), word(high)];
  return least === most ? least : `${least}–${most}`;
}

// on rank 3; on ranks 0, 3, 5; on 12 ranks; on all ranks. Nothing where there is one rank.
function whichRanks(some, all) {
  if (all === 1) return "";
  if (some.length === all) return " on all ranks";
  if (some.length > LISTED) return ` on ${some.length} ranks`;
  return ` on ${some.length > 1 ? "ranks" : "rank"} ${some.join(", ")}`;
}
