"""Finds where nbtrain's source touches what other packages keep to themselves, and where it changes their attributes.

    for found in private(source, "nbtrain/x.py"):
        print(found)                # nbtrain/x.py:12: torch._foreach_mul_ …

It reads, and imports nothing: a name is somebody's because of the file's imports, and nbtrain's own because a class of
nbtrain's defines it. What a variable holds is not known: of `x._name` it is asked whether some class of the file has
that name (ruff's SLF001 sees to the rest).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = "nbtrain"
MARKS = "_nbtrain"
"""How attributes begin that nbtrain puts on the objects of others."""

DOCUMENTED: Mapping[str, str] = {
    "_fields": "named tuples", "_asdict": "named tuples", "_replace": "named tuples", "_make": "named tuples",
    "_field_defaults": "named tuples", "_repr_html_": "IPython asks an object for it",
    "_repr_pretty_": "IPython asks an object for it", "_repr_mimebundle_": "IPython asks an object for it",
    "_ipython_display_": "IPython asks an object for it", "_render_traceback_": "IPython asks an exception for it",
    "os._exit": "Python's library reference has it",
}  # fmt: skip
"""Names with an underscore that their packages document."""

NAMED = ("TypeVar", "ParamSpec", "NewType", "namedtuple", "type")
"""What they make has the name that they are given."""

CHANGE_A_DICT = ("update", "pop", "setdefault", "clear", "popitem")
IN_COMPAT = "nbtrain/compat is the one place for it: call a function there that says what it means, or write one"
MARK = f"{IN_COMPAT} (a mark of nbtrain's own begins with {MARKS})"
PUBLIC_NAME = "it is used from elsewhere: give it a public name"
LISTEN = "nbtrain/compat/intercept.py replaces functions of others, and nothing else: give it a row and listen to that"


@dataclass(frozen=True, order=True)
class Found:
    path: str
    line: int
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}; {self.remedy}"


def sources(*without: str) -> Iterator[tuple[str, str]]:
    """(path, source) of all of nbtrain, but for these files and folders."""
    for file in sorted((ROOT / OWN).rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if not path.startswith(without):
            yield path, file.read_text()


def private(source: str, path: str = "nbtrain/example.py", allowed: Mapping[str, str] | None = None) -> list[Found]:
    """Imports, attributes and strings that name what others keep to themselves. `allowed`: string → why."""
    return _ordered(_Private(_read(source, path), allowed or {}).found)


def assigned(source: str, path: str = "nbtrain/example.py", allowed: Mapping[str, str] | None = None) -> list[Found]:
    """Attributes of modules and classes of others that are set or deleted. `allowed`: path → why."""
    return _ordered(_Assigned(_read(source, path), allowed or {}).found)


def _ordered(found: list[Found]) -> list[Found]:
    return sorted(set(found))


def is_private(name: str) -> bool:
    return bool(re.match(r"_+[A-Za-z0-9]", name)) and not re.fullmatch(r"__\w+__", name)


# --- files and their names -----------------------------------------------------------------------


@dataclass(eq=False)
class _File:
    path: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    """name → dotted path of what it stands for; also of imports within functions"""
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    texts: set[ast.AST] = field(default_factory=set)
    """docstrings, and strings that stand below an attribute to say what it is"""

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def path_of(self, node: ast.AST) -> str:
        """`nn.Module.__call__` is torch.nn.Module.__call__. Empty: it does not begin with something imported."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports or self._is_local(node):
            return ""
        return ".".join([self.imports[node.id], *reversed(names)])

    def foreign(self, node: ast.AST) -> str:
        found = self.path_of(node)
        return "" if found.split(".")[0] in (OWN, "__future__") else found

    def _is_local(self, node: ast.Name) -> bool:
        """A parameter of that name hides what was imported."""
        return any(_takes(one, node.id) for one in self.around(node))


def _takes(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return any(arg is not None and arg.arg == name for arg in every)


@functools.cache
def _read(source: str, path: str) -> _File:
    file = _File(path, ast.parse(source))
    for node in ast.walk(file.tree):
        for child in ast.iter_child_nodes(node):
            file.parents[child] = node
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.split(".")[0]
                file.imports[bound] = name.name if name.asname else bound
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                file.imports[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.ClassDef):
            file.classes[node.name] = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            file.texts.add(node.value)
    return file


@functools.cache
def _own_file(module: str) -> _File | None:
    """Of nbtrain's."""
    at = ROOT / module.replace(".", "/")
    for file in (at.with_suffix(".py"), at / "__init__.py"):
        if file.is_file():
            return _read(file.read_text(), file.relative_to(ROOT).as_posix())
    return None


def _is_module(dotted: str) -> bool:
    return _own_file(dotted) is not None or (ROOT / dotted.replace(".", "/")).is_dir()


@functools.cache
def _own_names() -> frozenset[str]:
    """Attributes of all classes of nbtrain's outside of compat."""
    files = (_read(source, path) for path, source in sources(f"{OWN}/compat/"))
    return frozenset().union(*(_defines(cls) for file in files for cls in file.classes.values()))


@functools.cache
def _defines(cls: ast.ClassDef) -> set[str]:
    """The attributes that this class itself has, and gives to its objects."""
    names: set[str] = set()
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in _targets(node):
            if isinstance(target, ast.Name):
                names.add(target.id)
                if target.id == "__slots__" and isinstance(node, ast.Assign):
                    names |= {str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    for inner in ast.walk(cls):
        for target in _targets(inner):
            if isinstance(target, ast.Attribute) and _is_self(target.value):
                names.add(target.attr)
        if isinstance(inner, ast.Call) and _last(inner.func) in ("setattr", "__setattr__") and len(inner.args) == 3:
            first, name, _ = inner.args
            if _is_self(first) and isinstance(name, ast.Constant):
                names.add(str(name.value))
    return names


@functools.cache
def _inherits(cls: ast.ClassDef, file: _File, itself: bool = True) -> set[str]:
    """And what its bases of nbtrain's have."""
    names = set(_defines(cls)) if itself else set()
    for base in cls.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(base, ast.Name) and base.id in file.classes and file.classes[base.id] is not cls:
            names |= _inherits(file.classes[base.id], file)
        elif (dotted := file.path_of(base)).startswith(f"{OWN}."):
            module, _, name = dotted.rpartition(".")
            other = _own_file(module)
            if other is not None and name in other.classes:
                names |= _inherits(other.classes[name], other)
    return names


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement sets or deletes, tuples taken apart."""
    todo: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        todo += node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.comprehension):
        todo.append(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        todo.append(node.optional_vars)
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Tuple | ast.List):
            todo += one.elts
        elif isinstance(one, ast.Starred):
            todo.append(one.value)
        else:
            yield one


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "mcs")


def _last(node: ast.AST) -> str:
    """The name of a function that is called, wherever it is from."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# --- what is private -----------------------------------------------------------------------------


class _Private(ast.NodeVisitor):
    def __init__(self, file: _File, allowed: Mapping[str, str]) -> None:
        self.file, self.allowed = file, allowed
        self.found: list[Found] = []
        self.known = set().union(*(_inherits(cls, file) for cls in file.classes.values()))
        """attributes of classes of this file"""
        self.parameters = {node.arg for node in ast.walk(file.tree) if isinstance(node, ast.arg)}
        self.visit(file.tree)

    def _add(self, node: ast.AST, what: str, remedy: str = IN_COMPAT) -> None:
        self.found.append(Found(self.file.path, node.lineno, what, remedy))  # type: ignore[attr-defined]

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._import(node, name.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            self._import(node, f"{node.module}.{name.name}")

    def _import(self, node: ast.AST, dotted: str) -> None:
        first, *_, last = dotted.split(".") if "." in dotted else (dotted, dotted)
        if first == OWN:
            if is_private(last) and not _is_module(dotted):
                self._add(node, f"{last} is imported, which is another file's own ({dotted})", PUBLIC_NAME)
        elif any(map(is_private, dotted.split("."))) and dotted not in DOCUMENTED:
            self._add(node, f"{dotted} is imported, which its package keeps to itself")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if is_private(node.attr) and not self._is_known(node):
            dotted = self.file.path_of(node)
            what = f"{dotted or ast.unparse(node)} is private, and nothing here defines it"
            ours = dotted.startswith(f"{OWN}.") or (not dotted and node.attr in _own_names())
            self._add(node, what, PUBLIC_NAME if ours else IN_COMPAT)
        self.generic_visit(node)

    def _is_known(self, node: ast.Attribute) -> bool:
        name, base = node.attr, node.value
        if name in DOCUMENTED or name.startswith(MARKS):
            return True
        if dotted := self.file.path_of(node):
            return dotted in DOCUMENTED or (dotted.startswith(f"{OWN}.") and _is_module(dotted))
        if isinstance(base, ast.Name) and base.id in self.file.classes:
            return name in _inherits(self.file.classes[base.id], self.file)
        within = [one for one in self.file.around(node) if isinstance(one, ast.ClassDef)]
        if within and isinstance(base, ast.Call) and _last(base.func) == "super":
            return name in _inherits(within[0], self.file, itself=False)
        if within and _is_self(base):
            return any(name in _inherits(cls, self.file) for cls in within)
        return name in self.known

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is not None and is_private(node.arg) and node.arg not in self.parameters:
            self._add(node.value, f"{node.arg} is the name of a private argument")
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        # Of `f"{FOLDER}._state.State"` and `f"{name}_host"` the first is a path.
        for part in node.values:
            if isinstance(part, ast.Constant):
                text = str(part.value)
                known = text.rpartition(".")[2] in DOCUMENTED
                path = re.search(r"(^|\w)\._[a-z]", text) and re.fullmatch(r"[\w.]+", text)
                if node not in self.file.texts and path and not known:
                    self._add(node, f"{text!r} is part of the path of something private")
            else:
                self.visit(part)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or node in self.file.texts or not _names_something_private(node.value):
            return
        if node.value not in self.allowed and not self._is_own_string(node, node.value):
            self._add(node, f'"{node.value}" is a name that some other package keeps to itself', MARK)

    def _is_own_string(self, node: ast.Constant, name: str) -> bool:
        parent = self.file.parents[node]
        if isinstance(parent, ast.Call) and parent.args:
            first = parent.args[0]
            if (_is_self(first) and name in self.known) or (first is node and _last(parent.func) in NAMED):
                return True  # getattr(self, "_open"), TypeVar("_T")
        return any(
            isinstance(one, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in one.targets)
            for one in self.file.around(node)
        )


def _names_something_private(text: str) -> bool:
    """An attribute, an operation, a module, or the end of one: what a program can look up."""
    names = text.strip(".").split(".")
    if not all(re.fullmatch(r"\w+", name) and not name[0].isdigit() for name in names):
        return False
    if names[0] == OWN or text in DOCUMENTED:
        return False
    return any(is_private(name) and not name.startswith(MARKS) and name not in DOCUMENTED for name in names)


# --- what is assigned ----------------------------------------------------------------------------


class _Assigned(ast.NodeVisitor):
    def __init__(self, file: _File, allowed: Mapping[str, str]) -> None:
        self.file, self.allowed = file, allowed
        self.found: list[Found] = []
        self.visit(file.tree)

    def _table(self, node: ast.AST) -> str:
        """`vars(nn.Module)`, `nn.Module.__dict__`"""
        if isinstance(node, ast.Call) and _last(node.func) == "vars" and len(node.args) == 1:
            return self.file.foreign(node.args[0])
        return self.file.foreign(node.value) if isinstance(node, ast.Attribute) and node.attr == "__dict__" else ""

    def _add(self, node: ast.AST, dotted: str, how: str) -> None:
        if dotted not in self.allowed:
            self.found.append(Found(self.file.path, node.lineno, f"{dotted} is {how}", LISTEN))  # type: ignore[attr-defined]

    def generic_visit(self, node: ast.AST) -> None:
        for target in _targets(node):
            how = "deleted" if isinstance(node, ast.Delete) else "set"
            if isinstance(target, ast.Attribute) and (dotted := self.file.foreign(target)):
                self._add(target, dotted, how)
            elif isinstance(target, ast.Subscript) and (dotted := self._table(target.value)):
                self._add(target, f"{dotted}.{_word(target.slice)}", how)
        super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, given = _last(node.func), node.args
        if name in ("setattr", "delattr", "__setattr__", "__delattr__") and given:
            if dotted := self.file.foreign(given[0]):
                attribute = _word(given[1]) if len(given) > 1 else "…"
                self._add(node, f"{dotted}.{attribute}", "deleted" if "del" in name else "set")
        elif name in CHANGE_A_DICT and (dotted := self._table(getattr(node.func, "value", node))):
            self._add(node, dotted, f"changed by {name}()")
        self.generic_visit(node)


def _word(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else f"{{{ast.unparse(node)}}}"
