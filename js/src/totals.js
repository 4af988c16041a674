// What the ranks of a run come to together, and what their memory is measured against.

const NEAR = 0.25; // of its limit: a bar of less is too short to be compared

// What a whole memory bar stands for: what a rank may have, or the largest rank where all are far from that.
export function scale(rows) {
  const most = Math.max(0, ...rows.map((row) => Math.max(row.peak || 0, row.memory || 0)));
  const near = rows.some((row) => row.limit > 0 && Math.max(row.peak || 0, row.memory || 0) >= NEAR * row.limit);
  return near ? { of: "limit", whole: null } : { of: "largest", whole: most };
}

// Null for a single rank. `limit`: what the machines have, where their ranks share that; of GPUs, all cards together.
// The ranks of each machine come after another, and are as many.
export function totals(rows, machines = 1) {
  if (rows.length < 2) return null;
  const sum = (name) => {
    const known = rows.map((row) => row[name]).filter(Number.isFinite);
    return known.length ? known.reduce((all, one) => all + one, 0) : null;
  };
  const cards = rows.filter((row) => row.reserved);
  const place = (row, i) => `${Math.floor((i * machines) / rows.length)} ${cards.length ? row.device : ""}`;
  const places = new Map(rows.map((row, i) => [place(row, i), row.limit]));
  const limit = [...places.values()].reduce((all, one) => all + (one || 0), 0);
  const memory = sum("memory");
  const alike = rows.every((row) => row.limit === rows[0].limit) && rows.length % machines === 0;
  const busy = cards.map((row) => row.card).filter(Number.isFinite);
  return {
    rate: sum("rate"),
    memory,
    limit: alike && memory <= limit ? limit : 0,
    use: sum("use"),
    card: busy.length ? busy.reduce((all, one) => all + one, 0) / busy.length : null,
  };
}
