// A curve of any length in bounded memory: when there are too many points, neighbours become one bucket that keeps its
// lowest and its highest value, so that no spike is ever lost.

export const LIMIT = 4096; // buckets a curve has at most

export const [NAN, INF, MINUS_INF] = [1, 2, 4]; // what came in a bucket that is not finite, as bits

export class Series {
  constructor(limit = LIMIT) {
    this.limit = limit;
    this.x = []; // where each bucket begins
    this.low = []; // null: a gap
    this.high = [];
    this.bad = []; // which values came that are not finite; 0: none
    this.spoilt = 0; // the same, of the whole curve
    this.last = null; // the value added last
    this.count = 0; // points ever added
    this.width = 1; // points in a bucket
    this._open = 0; // points in the last bucket
  }

  // As a feed sends it. Every bucket but the last is full.
  static from({ x, low, high, bad, last, count, width }, limit = LIMIT) {
    const series = new Series(limit);
    Object.assign(series, { x: [...x], low: [...low], high: [...high], last: numeric(last), count, width });
    series.bad = bad ? [...bad] : low.map((value) => (value === null ? NAN : 0));
    series.spoilt = series.bad.reduce((all, one) => all | one, 0);
    series._open = x.length ? Math.min(width, Math.max(1, count - (x.length - 1) * width)) : 0;
    while (series.length >= limit) series._halve();
    return series;
  }

  get length() {
    return this.x.length;
  }

  // Values that are not finite leave a gap: they are counted, and are the last value if they came last. JSON has them
  // as strings.
  add(x, value) {
    const y = numeric(value);
    this.last = y;
    this.count += 1;
    const known = Number.isFinite(y);
    const bad = known ? 0 : y === Infinity ? INF : y === -Infinity ? MINUS_INF : NAN;
    this.spoilt |= bad;
    const end = this.x.length - 1;
    if (this._open > 0 && this._open < this.width) {
      if (known) {
        this.low[end] = lower(this.low[end], y);
        this.high[end] = higher(this.high[end], y);
      }
      this.bad[end] |= bad;
      this._open += 1;
      return;
    }
    this.x.push(x);
    this.low.push(known ? y : null);
    this.high.push(known ? y : null);
    this.bad.push(bad);
    this._open = 1;
    if (this.x.length >= this.limit) this._halve();
  }

  _halve() {
    const { x, low, high, bad } = this;
    const half = x.length >> 1;
    for (let i = 0; i < half; i++) {
      const a = 2 * i;
      x[i] = x[a];
      low[i] = lower(low[a], low[a + 1]);
      high[i] = higher(high[a], high[a + 1]);
      bad[i] = bad[a] | bad[a + 1];
    }
    const odd = x.length % 2;
    if (odd) {
      for (const list of [x, low, high, bad]) list[half] = list[list.length - 1];
    } else {
      this._open += this.width; // the last bucket, open as it is, after a full one
    }
    x.length = low.length = high.length = bad.length = half + odd;
    this.width *= 2;
  }
}

const numeric = (value) => (typeof value === "string" ? Number(value) : value);
const lower = (a, b) => (a === null ? b : b === null ? a : Math.min(a, b));
const higher = (a, b) => (a === null ? b : b === null ? a : Math.max(a, b));

// One of the values that the bits stand for.
export const oneOf = (bits) => (bits & NAN || !bits ? NaN : bits & INF ? Infinity : -Infinity);

// NaN, inf: the words of PyTorch for what came.
export function notFinite(bits) {
  const words = [
    [NAN, "NaN"],
    [INF, "inf"],
    [MINUS_INF, "-inf"],
  ];
  return words
    .filter(([bit]) => bits & bit)
    .map(([, word]) => word)
    .join(" and ");
}
