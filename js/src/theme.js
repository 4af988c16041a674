// Colours that can be told apart on light and on dark ground. Whoever cannot has dashes and words besides.

const LIGHT = ["#1c6cb3", "#c04a12", "#2a7d3c", "#8348bd", "#8f6a00", "#bd3173", "#107a85", "#5a6270"];
const DARK = ["#6db3f2", "#ff9a63", "#6fcf83", "#c79ff7", "#e3bf4e", "#f58fbd", "#58cfd9", "#b5bcc8"];
const DASHES = [[], [8, 3], [2, 2], [8, 3, 2, 3], [14, 4], [5, 2, 1, 2], [1, 3], [14, 3, 2, 3, 2, 3]];
const OF_PHASE = { data: 4, forward: 0, backward: 3, communication: 1, optimizer: 2, rest: 7 };

export const DISTINCT = DASHES.length; // so many ranks look different from each other

export class Theme {
  // `root` is where nbtrain is shown; what it inherits says whether it is on light or on dark ground.
  constructor(root) {
    this._root = root;
    this._listeners = new Set();
    this.dark = false;
    this._look = () => this.look();
    this._media = window.matchMedia("(prefers-color-scheme: dark)");
    this._media.addEventListener("change", this._look);
    this._watch = new MutationObserver(this._look);
    for (const node of [document.documentElement, document.body]) this._watch.observe(node, { attributes: true });
    this.look();
  }

  // JupyterLab, Colab and VS Code each say it in a way of their own; bright letters they all have on dark ground.
  look() {
    const inherited = getComputedStyle(this._root.parentElement ?? document.body).color;
    const [red, green, blue] = (inherited.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
    const dark = 0.3 * red + 0.59 * green + 0.11 * blue > 128;
    const changed = dark !== this.dark;
    this.dark = dark;
    this._root.classList.toggle("nbt-dark", dark);
    this._root.style.setProperty("--nbt-ground", ground(this._root));
    if (changed) for (const listener of [...this._listeners]) listener();
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  rank(number) {
    return (this.dark ? DARK : LIGHT)[number % DISTINCT];
  }

  dash(number) {
    return DASHES[number % DISTINCT];
  }

  phase(name) {
    return (this.dark ? DARK : LIGHT)[OF_PHASE[name]];
  }

  get soft() {
    return this.dark ? "#b4b4b4" : "#5c5c5c";
  }

  get grid() {
    return this.dark ? "rgba(255,255,255,.13)" : "rgba(0,0,0,.09)";
  }

  close() {
    this._watch.disconnect();
    this._media.removeEventListener("change", this._look);
  }
}

// What is behind a node: for what has to cover something else.
function ground(node) {
  for (let around = node.parentElement; around; around = around.parentElement) {
    const colour = getComputedStyle(around).backgroundColor;
    if (!/^transparent$|, 0\)$/.test(colour)) return colour;
  }
  return "Canvas";
}

// #1c6cb3 -> rgba(28,108,179,.2)
export function faint(colour, alpha) {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
}
