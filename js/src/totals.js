// What the ranks of a run come to together, and what their memory is measured against.

const NEAR = 0.25; // of its limit: a bar of less is too short to be compared

// What a whole memory bar stands for: what a rank may have, or the largest rank where all are far from that.
export function scale(rows) {
  const most = Math.max(0, ...rows.map((row) => Math.max(row.peak || 0, row.memory || 0)));
  const near = rows.some((row) => row.limit > 0 && Math.max(row.peak || 0, row.memory || 0) >= NEAR * row.limit);
  return near ? { of: "limit", whole: null } : { of: "largest", whole: most };
}

// Null for a single rank. `limit`: what the machine has, where its ranks share that; of GPUs, all cards together.
export function totals(rows) {
  if (rows.length < 2) return null;
  const sum = (name) => {
    const known = rows.map((row) => row[name]).filter(Number.isFinite);
    return known.length ? known.reduce((all, one) => all + one, 0) : null;
  };
  const cards = rows.filter((row) => row.reserved);
  const places = new Map((cards.length ? cards : rows).map((row) => [cards.length ? row.device : "machine", row.limit]));
  const limit = [...places.values()].reduce((all, one) => all + (one || 0), 0);
  const memory = sum("memory");
  const one = rows.every((row) => row.limit === rows[0].limit) && memory <= limit; // else they are on several machines
  const busy = cards.map((row) => row.card).filter(Number.isFinite);
  return {
    rate: sum("rate"),
    memory,
    limit: one ? limit : 0,
    use: sum("use"),
    card: busy.length ? busy.reduce((all, one) => all + one, 0) / busy.length : null,
  };
}
