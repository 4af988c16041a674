// Writing a line into the cell below. JupyterLab's and Notebook's widget managers know the notebook; other front ends' do
// not, and their users copy the line.

import { completed } from "./magic_line.js";

// What became of it, in the kernel's words for it.
export const [NEXT, NEW, NONE, NOWHERE] = ["next", "new", "none", ""];

// `node`: in the output of the cell above; `manager`: of its widget; `flags`: see magic_line.js.
export function writeBelow(node, manager, line, magic, flags) {
  const model = manager?.context?.model;
  const at = cellIndex(node);
  if (!model?.sharedModel?.insertCell || model.readOnly || at < 0) return NOWHERE;
  return write(model.sharedModel, at, line, magic, flags);
}

// `notebook`: its cells, and insertCell(index, cell); `at`: the cell above.
export function write(notebook, at, line, magic, flags) {
  const below = notebook.cells.findIndex((cell, i) => i > at && cell.cell_type === "code");
  if (below < 0) return NONE;
  const source = edit(notebook.cells[below].getSource(), line, magic, flags);
  if (source === null) {
    notebook.insertCell(below, { cell_type: "code", source: line, metadata: { trusted: true } });
    return NEW;
  }
  notebook.cells[below].setSource(source);
  return NEXT;
}

// What a cell becomes: in one that begins with the magic its line is another, with the options that it had besides.
// Null where the cell is somebody else's.
export function edit(source, line, magic, flags) {
  if (!source.trim()) return `${line}\n`;
  const lines = source.split("\n");
  const at = lines.findIndex((each) => each.trim() && !/^%%(time|capture)\b/.test(each.trim()));
  const [, first, rest] = (lines[at] ?? "").match(/^\s*(\S*)(.*)$/);
  if (first !== `%%${magic}`) return null;
  lines[at] = completed(line, rest, flags);
  return lines.join("\n");
}

// JupyterLab draws only the cells around those that are seen, and numbers them.
function cellIndex(node) {
  const cell = node.closest(".jp-Cell");
  if (!cell) return -1;
  const number = cell.dataset.windowedListIndex;
  return number ? Number(number) : [...cell.parentNode.children].filter((one) => one.matches(".jp-Cell")).indexOf(cell);
}
