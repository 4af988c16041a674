"""The statements of the cells that were run, in their order, without those that plainly do nothing for a script: what
shows values or writes a file, magics, and definitions that nobody reads.

In doubt a statement is kept: it does there what it did in the notebook."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.annexes.export.text_edits import Edits
from nbtrain.exchange.names.cell_names import analyse

DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPOUND = (ast.If, ast.For, ast.While, ast.Try, ast.With)
COMPUTES = (ast.Call, ast.Subscript, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
SHOWS = frozenset(
    {
        "print", "display", "help", "dir", "type", "len", "repr", "str", "round", "sum", "min", "max", "sorted", "list",
        "show", "head", "tail", "describe", "info", "item", "mean", "std", "numel", "size", "keys", "values", "items",
        "parameters", "named_parameters", "state_dict", "tolist", "value_counts", "format",
        "allclose", "equal", "tensor", "isinstance", "abs", "all", "any", "sqrt", "join", "cpu", "detach", "numpy",
        "argmax", "float", "int", "bool", "count", "unique", "norm", "memory_allocated",
    }
)  # fmt: skip
"""calls of these change nothing"""
SCREEN = frozenset({"matplotlib", "seaborn", "plotly", "IPython", "ipywidgets"})
"""libraries that show"""
WRITES = frozenset(
    {
        "savefig", "to_csv", "to_parquet", "to_json", "to_pickle", "to_excel", "to_feather", "to_hdf", "to_disk",
        "save", "savez", "savez_compressed", "savetxt", "save_pretrained", "save_model", "save_to_disk",
        "save_weights", "save_image", "save_file", "save_checkpoint", "save_state", "imsave", "imwrite",
        "write_text", "write_bytes", "write_image", "write_html", "tofile", "push_to_hub", "to_onnx", "export_onnx",
    }
)  # fmt: skip
"""functions and methods that write a file"""
DUMPS = frozenset({"json", "pickle", "joblib", "yaml", "dill", "cloudpickle", "marshal"})
"""libraries whose dump writes a file"""


@dataclass(slots=True)
class Statement:
    """One statement of a cell that was run."""

    cell: int
    text: str
    """with the comments before and behind it"""
    node: ast.stmt
    reads: frozenset[str]
    """also those that functions in it read when they are called"""
    binds: frozenset[str]

    @property
    def defines(self) -> bool:
        return isinstance(self.node, DEFINES)


@dataclass(slots=True)
class Kept:
    """What a script has of the history."""

    statements: list[Statement] = field(default_factory=list)
    lost: dict[str, Statement] = field(default_factory=dict)
    """name → the statement that has made it, which needs nbtrain"""
    left_out: list[Statement] = field(default_factory=list)
    """those that need nbtrain"""


def statements(cell: int, source: str, writes: bool = False) -> list[Statement]:
    """Those of one cell. Magics, and calls of the shell, are not its own. `writes`: with what writes files."""
    source = source if writes else _without_writes(source)
    edits, made, end = Edits(source), [], 0
    for node in ast.parse(source).body:
        decorated = [(decorator.lineno, 0) for decorator in getattr(node, "decorator_list", ())]
        start = edits.place(*min([(node.lineno, node.col_offset), *decorated]))
        comments = [line for line in edits.raw[end:start].decode().splitlines() if line.lstrip().startswith("#")]
        end = edits.place(node.end_lineno, node.end_col_offset)
        own = edits.raw[start:end].decode()
        behind = edits.raw[end:].partition(b"\n")[0]
        comment = f"  {behind.decode().strip(' ;')}" if behind.strip(b" ;").startswith(b"#") else ""
        end += len(behind) if comment else 0
        names = analyse(own)
        if "get_ipython" not in {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}:
            made.append(Statement(cell, "\n".join([*comments, own + comment]), node, names.reads, names.writes))
    return made


def writes_file(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    last = last_name(node.func)
    if last == "open":
        at = 0 if isinstance(node.func, ast.Attribute) else 1
        modes = [*node.args[at : at + 1], *(word.value for word in node.keywords if word.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)
    return last in WRITES or (last in ("dump", "safe_dump") and root(node.func) in DUMPS)


def last_name(node: Any) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def root(node: Any) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _without_writes(source: str) -> str:
    """A script that saved what the notebook has saved would overwrite it, with other weights."""
    edits = Edits(source)

    def leave_out(body: Iterable[ast.AST]) -> None:
        for node in body:
            calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
            calls += [node.value] if isinstance(node, ast.Expr) else []
            if any(map(writes_file, calls)):
                edits.replace(node, "pass")
            elif isinstance(node, ast.stmt | ast.excepthandler) and not isinstance(node, DEFINES):
                leave_out(ast.iter_child_nodes(node))

    leave_out(ast.parse(source).body)
    return edits.text()


def kept(history: Iterable[Statement], wanted: Iterable[str], namespace: Mapping[str, Any]) -> Kept:
    """`wanted`: names that the cell reads."""
    chosen = Kept()
    screen = {name for name, value in namespace.items() if library(value) in SCREEN and name != "open"}
    for statement in history:
        if isinstance(statement.node, ast.Expr | ast.Pass) and _only_shows(statement.node, screen):
            continue
        if not isinstance(statement.node, ast.Import | ast.ImportFrom) and _needs_nbtrain(
            statement, namespace, chosen.lost
        ):
            chosen.left_out.append(statement)
            chosen.lost |= dict.fromkeys(statement.binds, statement)
            continue
        chosen.statements.append(statement)
        chosen.lost = {name: of for name, of in chosen.lost.items() if name not in statement.binds}
        if isinstance(statement.node, ast.Assign) and root(statement.node.value) in screen:
            screen |= statement.binds
    if not any(analyse(statement.text).opaque for statement in chosen.statements):  # exec reads what nobody sees
        late = frozenset().union(*(statement.reads for statement in chosen.statements if statement.defines))
        chosen.statements = _read(chosen.statements, {*wanted, *late}, late, screen)
    return chosen


def _only_shows(node: ast.AST, screen: set[str]) -> bool:
    """Whether all its calls show. `screen`: names of what does."""
    computes = [inner for inner in ast.walk(node) if isinstance(inner, COMPUTES)]
    return all(last_name(call) in SHOWS or root(call) in screen for call in computes)


def _needs_nbtrain(statement: Statement, namespace: Mapping[str, Any], lost: Mapping[str, Statement]) -> bool:
    return any(name in lost or library(namespace.get(name)) == "nbtrain" for name in statement.reads)


def library(value: Any) -> str:
    """That a module, function, class or object is of."""
    if isinstance(value, type(builtins)):
        return value.__name__.partition(".")[0]
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]


def _read(statements: list[Statement], wanted: set[str], late: frozenset[str], screen: set[str]) -> list[Statement]:
    """Without definitions that nobody reads. `late`: names that functions read when they are called."""
    kept = []
    for statement in reversed(statements):
        if _only_binds(statement.node, screen) and not statement.binds & wanted:
            continue
        kept.append(statement)
        if not isinstance(statement.node, COMPOUND):
            wanted -= statement.binds
        calls = not statement.defines and any(isinstance(part, ast.Call) for part in ast.walk(statement.node))
        wanted |= statement.reads | (late if calls else frozenset())
    return kept[::-1]


def _only_binds(node: ast.stmt, screen: set[str]) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return node.names[0].name != "*"
    if isinstance(node, DEFINES):
        return not node.decorator_list
    if not isinstance(node, ast.Assign) or not _only_shows(node.value, screen):
        return False
    return not any(
        isinstance(part, ast.Attribute | ast.Subscript) for target in node.targets for part in ast.walk(target)
    )
