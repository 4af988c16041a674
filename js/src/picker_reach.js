// What the width of a bar stands for: all that is needed, and the room, unless that is so large that nothing else would
// be seen.
export function reach(shown) {
  const known = shown.filter((one) => one.memory);
  const most = Math.max(0, ...known.map((one) => one.memory.peak));
  const room = Math.max(0, ...known.map((one) => one.room).filter((one) => one < 3 * most));
  return 1.05 * Math.max(most, room);
}
