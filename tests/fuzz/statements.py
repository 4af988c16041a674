"""Statements that fit the objects there are: edits in place, definitions, aliases, deletions, training steps."""

# ruff: noqa: E501 — a template is one line
from __future__ import annotations

import collections
import functools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.fuzz.values import ATOMS, KEYS, Scene, shown, there, value

NAMES = ("a", "b", "c", "d", "o", "p")
OTHER = ("f", "g", "C", "D")
SHADOWING = ("list", "sum", "device", "log", "rank")

EDITS: dict[type, tuple[str, ...]] = {
    list: (
        "{x}.append({v})", "{x}[0] = {v}", "del {x}[0]", "{x}[:] = [{v}, {v}]", "{x}.insert(0, {v})", "{x}.reverse()",
        "{x}.clear()", "{x} += [{v}]", "{x}.extend([{v} for _ in range(2)])", "{x}[1:2] = []", "{x}.append({x})",
        "{x}.pop()",
    ),
    dict: (
        "{x}[{k}] = {v}", "del {x}[{k}]", "{x}.update(k={v}, n={v})", "{x}[{k}] = {x}.pop({k})", "{x} |= {{'z': {v}}}",
        "{x}.setdefault('n', []).append({v})", "{x}.clear()", "{x}['self'] = {x}", "{x}.popitem()",
    ),
    set: ("{x}.add({a})", "{x}.discard({a})", "{x} |= {{1, 'z'}}", "{x}.clear()", "{x} -= {{1}}"),
    collections.deque: ("{x}.append({v})", "{x}.appendleft({v})", "{x}.rotate(1)", "{x}.popleft()", "{x}[0] = {v}"),
    bytearray: ("{x}.extend(b'z')", "{x}[0] = 65", "del {x}[:2]"),
    np.ndarray: (
        "{x}[...] = 3", "{x}[0] = 7", "{x} += 1", "{x}.sort()", "{x}[::2] = 0",
        "{x}[-1] = {x}[0]", "{x}.fill(2)", "{x}.shape = (-1,)", "{x}[0] = {v}",
    ),
    torch.nn.Module: (
        "{x}.eval()", "{x}.x = {v}",  "{x}.register_buffer('seen', torch.zeros(2))", "{x}.train(False)",
        "{x}.weight = torch.nn.Parameter(torch.zeros(2, 2))", "{x}.requires_grad_(False)", "{x}.y = torch.nn.Linear(2, 2)",
        "{x}.load_state_dict({{k: v + 1 for k, v in {x}.state_dict().items()}})", "{x}.weight = {m}.weight",
        "del {x}.weight", "{x}.x.append({v})", "{x}.float()", "{x}.y = {m}", "{x}.weight.data.mul_(2)",
        "{x}.register_forward_hook({f})", "{x}.forward = {f}",
        "[{x}(torch.ones(2, 2).to(next({x}.parameters()).dtype)) for _ in (1, 2)]",
    ),
    # Not here: `resize_`. Content and shape follow, sharing does not.
    torch.Tensor: (
        "{x}.data = {x}.data.clone()", "{x}.data = {x}.data[:1]", "{x}.data = {x}.data.double()",
        "{x}.data[0] = 5", "{x}.data.mul_(2)", "{x}.data.add_(1)",
         "{x}.requires_grad_(not {x}.requires_grad)",
        "{x}.detach().zero_()", "{x}.note = {v}",
    ),
    torch.optim.Optimizer: (
        "{x}.param_groups[0]['lr'] = 0.25", "for q in {x}.param_groups[0]['params']: q.grad = torch.ones_like(q)\n"
        "{x}.step(); {x}.zero_grad(); del q", "{x}.state.clear()", "{x}.add_param_group({{'params': [torch.nn.Parameter("
        "torch.ones(2))]}})",
    ),
    functools.partial: ("{x}.keywords['k'] = {v}", "{x}.note = {v}"),
    types.SimpleNamespace: ("{x}.x = {v}", "{x}.y = {x}", "del {x}.x", "{x}.x, {x}.y = {x}.y, {x}.x"),
    types.FunctionType: ("{x}.note = {v}", "{x}.__defaults__ = ({v},)", "c = {x}({v})", "{x}()", "{x}.__name__ = 'n'"),
    weakref.WeakKeyDictionary: ("{x}[{w}] = {v}",),
}  # fmt: skip
OF_OURS = (
    "{x}.left = {v}", "{x}.right = {x}", "del {x}.left", "{x}.bump()", "{x}.more = {v}", "{x}.right = {v}",
    "{x}.__class__ = {C}", "{x}.wide = {v}", "{x}.left, {x}.right = {x}.right, {x}.left", "{x}.left.append({v})",
)  # fmt: skip
OF_CLASSES = (
    "{x}.shared = {v}", "{x}.extra = lambda self: {n}", "{x}.bump = {f}", "del {x}.shared", "{x}.shared.append({v})",
    "{x}.wide = property(lambda self: self.left)", "{x}.new = classmethod(lambda cls: cls())",
)  # fmt: skip

CLASSES = (
    "class {N}:\n    shared = []\n    def __init__(self, left=None, right=0):\n"
    "        self.left = left; self.right = right\n    def bump(self):\n        self.right = [self.right]; return self",
    "class {N}:\n    __slots__ = ('left', 'right', '__weakref__')\n    def __init__(self, left=None, right=None):\n"
    "        self.left = left\n    def bump(self): self.right = {N}\n    shared = {v}",
    "@dataclasses.dataclass\nclass {N}:\n    left: object = None\n    right: list = dataclasses.field(default_factory=list)"
    "\n    def bump(self): self.left = (self.left,)",
    "@dataclasses.dataclass(frozen=True, slots=True)\nclass {N}:\n    left: object = 1\n    right: tuple = ()",
    "class {N}(enum.Enum):\n    ONE = 1\n    TWO = 'two'\n    ALSO = 1\n    def bump(self): return self.name",
    "class {N}(enum.Enum):\n    ONE = (1, 2)\n    TWO = (3, 4)\n    def __init__(self, left, right):\n"
    "        self.left = left; self.right = [right]\n    @property\n    def wide(self): return self.left",
    "class {N}(enum.Flag):\n    ONE = 1\n    TWO = 2",
    "{N} = collections.namedtuple('{N}', 'left right', defaults=(1, 2))",
    "class {N}(typing.NamedTuple):\n    left: int = 0\n    right: object = None",
    "class {N}({C}):\n    def bump(self): super().bump(); return __class__",
    "class {N}({C}):\n    def __init__(self, *args):\n        super().__init__(*args); self.wide = {n}\n"
    "    @property\n    def twice(self): return (self.left, self.left)\n    @twice.setter\n"
    "    def twice(self, to): self.left = to\n    @staticmethod\n    def lone(): return {n}",
    "class {N}(list):\n    def bump(self): self.append(1); self.note = len(self)",
    "class {N}(dict):\n    left = 1\n    def __missing__(self, key): return {n}",
    "class {N}(torch.nn.Module):\n    def __init__(self, left=1, right=2):\n        super().__init__()\n"
    "        self.x = []; self.one = torch.nn.Linear(2, 2); self.two = self.one; self.left = left\n"
    "    def forward(self, x): return self.two(self.one(x))\n    def bump(self): self.x.append(self.one.weight)",
    "class {N}:\n    table = {{}}\n    def __init_subclass__(cls, **kw): {N}.table[cls.__name__] = cls",
    "class {N}(abc.ABC):\n    left = None\n    @abc.abstractmethod\n    def bump(self): ...",
    "class {N}(typing.Generic[typing.TypeVar('T')]):\n    left: int = 1\n    def bump(self): self.left += 1",
    "class {N}(Exception):\n    def __init__(self, left=0, right=1):\n        super().__init__('no'); self.left = left",
    "class {N}(int):\n    def bump(self): return {N}(self + 1)",
    "class {N}(type):\n    def bump(cls): return cls\nclass {M}(metaclass={N}):\n    left = 2",
    "class {N}:\n    left = 5\n    def __eq__(self, other): return type(other) is {N} and other.left == self.left\n    __hash__ = None",
    "class {N}:\n    def __eq__(self, other): return True\n    def __hash__(self): return hash(self.left)\n    left = 3",
    "class {N}({C}, {D}): pass",
    "class {N}:\n    @functools.cached_property\n    def wide(self): return [1]\n    class In:\n        left = 1\n"
    "    @classmethod\n    def new(cls): return cls.In()\n    def bump(self): self.left = self.wide; self.right = self.new()",
)  # fmt: skip
FUNCTIONS = (
    "def {F}(x=1): return [x, {n}]",
    "def {F}(x={v}, *, k={v}): x.append({n}); return x",
    "def {F}():\n    count = 0\n    def up(*_):\n        nonlocal count\n        count += 1\n        return count\n"
    "    def see(*_): return count\n    return up, see\n{n}, {m_} = {F}()",
    "def {F}(x=None):\n    global {n}\n    {n} = {v}",
    "def {F}(x=None):\n    global {n}\n    {n} = [x]\n{F}({v})",
    "@functools.wraps({f})\ndef {F}(*args): return {f}(*args)",
    "@functools.lru_cache\ndef {F}(x=1): return (x, 1)",
    "{F} = lambda *x: {n}",
    "def {F}(x=3): return {F}(x - 1) if isinstance(x, int) and 0 < x < 9 else {n}",
    "def {F}(x: int = 1) -> list:\n    '''It says.'''\n    class In:\n        left = x\n        def bump(self): return __class__\n"
    "    return In()",
    "{F} = functools.partial({f}, {v})",
    "{F} = (lambda kept: lambda *x: kept.append(x) or kept)([])",
    "def {F}(self=None, *rest):\n    self.left = {n}\n    return self",
    "@functools.singledispatch\ndef {F}(x=1): return 1\n@{F}.register\ndef _(x: str): return {n}",
)  # fmt: skip
LINES = (
    "{n} = {v}", "{n} = {v}", "{n} = {v}", "{n} = {there}", "{n} = {shown}", "del {e}", "{n}, {m_} = {v}, {v}",
    "if {e}: {n} = {v}\nelse: {m_} = {v}", "{n} = [q for q in ({v}, {v})]", "{n} = {{k: {e} for k in 'ab'}}",
    "for {n} in ({v}, {v}): pass", "try:\n    {n} = {e}[5]\nexcept Exception:\n    {m_} = {v}", "{n} = {m_} = {v}",
    "with contextlib.suppress(Exception):\n    {n} = {v}\n    {m_} = {e}.nothing", "{s} = {v}", "del {s}",
    "{n} = torch.optim.SGD({m}.parameters(), 0.1, momentum=0.9)", "{n} = torch.optim.AdamW({m}.parameters(), 0.1)",
    "{n} = torch.optim.SGD([{P}], 0.5)", "{n} = f'{{{e}!r:.0}}'", "import math as {n}", "{n} = ({n} := {v})",
    "{n} = {e} if {e} is not None else {v}", "while True:\n    {n} = {v}\n    break", "{n} = {e} or {v}",
    "match {e}:\n    case [{n}, *_]: pass\n    case {m_}: pass", "{n} = {e}.copy()", "{n} = type({e})",
)  # fmt: skip


def statement(scene: Scene) -> str:
    """One, perhaps of several lines."""
    kind = scene.choose(12)
    if kind < 4:
        return _filled(scene, scene.pick(LINES))
    if kind < 9:
        found = _edits(scene)
        if found:
            x, templates = scene.pick(found)
            return _filled(scene, scene.pick(templates), x)
    return _filled(scene, scene.pick(CLASSES if kind % 2 else FUNCTIONS))


def _edits(scene: Scene) -> list[tuple[str, tuple[str, ...]]]:
    found: list[tuple[str, tuple[str, ...]]] = []
    for path in scene.places():
        obj = eval(path, scene.namespace)
        templates = tuple(t for cls, ts in EDITS.items() if isinstance(obj, cls) for t in ts)
        if isinstance(obj, type):
            templates = OF_CLASSES if obj.__module__ == "__main__" else ()
        elif type(obj).__module__ == "__main__":
            templates = (*templates, *OF_OURS)
        if templates:
            found.append((path, templates))
    return found


def _filled(scene: Scene, template: str, x: str = "a") -> str:
    """Every field of a template is drawn for itself, but for names that it makes."""
    kept = {"x": x, "N": scene.pick(OTHER[2:]), "M": "E", "F": scene.pick(OTHER[:2])}

    def field(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        drawn = kept.get(name) or _FIELDS[name](scene)
        if name not in ("v", "a"):
            kept[name] = drawn
        return drawn

    return re.sub(r"\{\{|\}\}|\{(\w+)\}", field, template)


def _one(scene: Scene, otherwise: str, *types_: type, where: Callable[[Any], bool] = lambda obj: True) -> str:
    found = scene.places(*types_, where=where)
    return scene.pick(found) if found else otherwise


_FIELDS: dict[str, Callable[[Scene], str]] = {
    "v": value,
    "a": lambda scene: scene.pick(ATOMS),
    "k": lambda scene: scene.pick(KEYS),
    "n": lambda scene: scene.pick(NAMES),
    "m_": lambda scene: scene.pick(NAMES),
    "s": lambda scene: scene.pick(SHADOWING),
    "e": lambda scene: _one(scene, "None") if scene.chance(3) else scene.pick(NAMES),
    "there": there,
    "shown": lambda scene: shown(scene) or there(scene),
    "m": lambda scene: _one(scene, "torch.nn.Linear(2, 2)", torch.nn.Module),
    "P": lambda scene: _one(scene, "torch.nn.Parameter(torch.ones(2))", torch.nn.Parameter),
    "f": lambda scene: _one(scene, "(lambda *x: None)", types.FunctionType),
    "C": lambda scene: _one(scene, "object", type, where=lambda c: c.__module__ == "__main__"),
    "D": lambda scene: _one(scene, "object", type, where=lambda c: c.__module__ == "__main__"),
    "w": lambda scene: _one(
        scene, "{1}", where=lambda o: type(o).__module__ == "__main__" and hasattr(o, "__weakref__")
    ),
}
