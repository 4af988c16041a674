// Where a value came that is not finite: a mark at the chart's upper edge, for no line can show it.

import { notFinite } from "./series.js";

const SIZE = 7; // pixels

// `shown.bad`: [column, which values]. Neighbours are one mark, and the first has a word.
export function drawMarks(plot, shown, place) {
  if (!shown.bad?.length) return;
  const context = plot.ctx;
  const scale = devicePixelRatio;
  const colour = getComputedStyle(place).getPropertyValue("--nbt-bad");
  const { top, height, left, width } = plot.bbox;
  context.save();
  context.beginPath();
  context.rect(left - SIZE * scale, 0, width + 2 * SIZE * scale, top + height);
  context.clip();
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = scale;
  const x = (column) => plot.valToPos(shown.data[0][column], "x", true);
  for (const [first, last] of runs(shown.bad.map(([column]) => column))) {
    const [begin, end] = [x(first), x(last)];
    context.globalAlpha = 0.35;
    if (first === last) context.fillRect(begin - scale / 2, top, scale, height);
    else context.fillRect(begin, top, end - begin, SIZE * scale * 0.7);
    context.globalAlpha = 1;
    context.beginPath();
    context.moveTo(begin - SIZE * scale * 0.7, top);
    context.lineTo(begin + SIZE * scale * 0.7, top);
    context.lineTo(begin, top + SIZE * scale);
    context.fill();
  }
  const [column, bits] = shown.bad[0];
  const word = Math.max(left, x(column));
  const right = word > left + width * 0.85;
  context.font = `bold ${11 * scale}px system-ui, sans-serif`;
  context.textAlign = right ? "right" : "left";
  context.textBaseline = "top";
  context.fillText(notFinite(bits), word + (right ? -1 : 1) * SIZE * scale, top + SIZE * scale * 0.9);
  context.restore();
}

// [first, last] of neighbours.
export function runs(sorted) {
  const found = [];
  for (const one of sorted) {
    const last = found[found.length - 1];
    if (last && one === last[1] + 1) last[1] = one;
    else found.push([one, one]);
  }
  return found;
}
