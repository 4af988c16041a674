// How all charts of a panel are drawn: what the controls above them set.

export class CurveSettings {
  constructor() {
    this.ranks = new Set(); // those that have a line of their own
    this.smoothing = 0; // of what came before, in an average: 0 to 0.99
    this.log = false;
    this.over = false; // the run has ended
    this.past = null; // an earlier run to compare with: { title, curves: name -> Series }
    this._listeners = new Set();
  }

  change(fields) {
    Object.assign(this, fields);
    for (const listener of [...this._listeners]) listener();
  }

  toggle(rank) {
    const ranks = new Set(this.ranks);
    if (!ranks.delete(rank)) ranks.add(rank);
    this.change({ ranks });
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }
}

const OTHERS = 7; // colours, and dashes, that a mean does not have

// The mean of a chart's n-th part is in the n-th colour; ranks have the others, and dashes, so that 49 look different.
export const partColour = (theme, part) => theme.rank(part);
export const rankColour = (theme, rank) => theme.rank(1 + (rank % OTHERS));
export const rankDash = (theme, rank) => theme.dash(1 + ((rank + Math.floor(rank / OTHERS)) % OTHERS));
export const PAST_DASH = [10, 5];
