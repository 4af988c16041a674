// Writing a line into the cell below. JupyterLab's editors are CodeMirror's, which are found from their own nodes; other
// front ends have none to be found, and their users copy the line.

const WORDS = "the next cell";

// What was written into, in words; empty where there is nothing to write into.
export function writeBelow(node, line, magic) {
  const view = below(node);
  if (!view) return "";
  const change = edit(view.state.doc.toString(), line, magic);
  if (!change) return "";
  view.dispatch({ changes: change });
  view.focus();
  return WORDS;
}

// What of a cell's text becomes what: the magic's own line is replaced, and one that is not there is put above all.
// Nothing where the cell is of another magic.
export function edit(source, line, magic) {
  let at = 0;
  let from = 0; // below what may stand above it
  for (const each of source.split("\n")) {
    const first = each.trim();
    const own = first === `%%${magic}` || first.startsWith(`%%${magic} `);
    if (own) return { from: at, to: at + each.length, insert: line };
    const above = /^%%(time|capture)\b/.test(first);
    if (first && !above) break;
    at += each.length + 1;
    if (above) from = Math.min(at, source.length);
  }
  if (source.slice(at).startsWith("%%")) return null;
  const broken = from > 0 && source[from - 1] !== "\n" ? "\n" : "";
  return { from, to: from, insert: `${broken}${line}\n` };
}

function below(node) {
  let cell = node.closest(".jp-Cell")?.nextElementSibling;
  while (cell && !cell.matches(".jp-CodeCell")) cell = cell.nextElementSibling;
  const content = cell?.querySelector(".cm-content");
  const view = content?.cmTile?.view ?? content?.cmView?.view;
  return view?.dispatch && !view.state.readOnly ? view : null;
}
