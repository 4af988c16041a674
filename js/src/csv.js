// The curves of a chart as CSV: a row for each x, a column for each curve; two more where neighbours were joined.

// `across`: what x is. `curves`: [{ name, series }].
export function csv(across, curves) {
  const rows = new Map();
  const heads = [across];
  for (const { name, series } of curves) {
    const joined = series.width > 1;
    const first = heads.push(...(joined ? [name, `${name} lowest`, `${name} highest`] : [name])) - (joined ? 3 : 1);
    for (let i = 0; i < series.length; i++) {
      const [x, low, high] = [series.x[i], series.low[i], series.high[i]];
      if (!rows.has(x)) rows.set(x, [x]);
      const row = rows.get(x);
      row[first] = low === null ? "NaN" : joined ? low + (high - low) / 2 : low;
      if (joined && low !== null) [row[first + 1], row[first + 2]] = [low, high];
    }
  }
  const sorted = [...rows.values()].sort(([a], [b]) => a - b);
  const line = (cells) => Array.from({ length: heads.length }, (_, i) => quoted(cells[i] ?? "")).join(",");
  return [heads, ...sorted].map(line).join("\n") + "\n";
}

const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell));
