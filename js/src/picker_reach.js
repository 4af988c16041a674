// What the full width of a card's bar stands for: what a rank may use. More than that is drawn whole, with a mark at the
// limit. Where the limit is not known, cards are compared with the largest.
export function reach({ memory, room }, cards) {
  if (room) return Math.max(room, memory.peak);
  return Math.max(...cards.map((one) => one.memory?.peak ?? 0));
}

// `3 %`, and never 0 % of what is something.
export function share(part, whole) {
  return part < 0.01 * whole ? "< 1 %" : `${Math.ceil((100 * part) / whole - 1e-9)} %`;
}
