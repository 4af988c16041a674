"""What a cell reads, writes and reaches, in every shape people write cells in."""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import glob
import os
import types
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nbtrain.exchange.names.cell_names import CellNames, analyse, own, private, reach
from nbtrain.exchange.names.code_globals import code_names
from nbtrain.exchange.names.object_globals import ELEMENTS, OBJECTS

BUILTIN = set(dir(__builtins__) if isinstance(__builtins__, types.ModuleType) else __builtins__)

# cell, reads, writes; built-ins are left out of both
CELLS: list[tuple[str, str, str]] = [
    # straight lines
    ("y = f(x)", "f x", "y"),
    ("x = 1\nprint(x)", "", "x"),
    ("n += 1", "n", "n"),
    ("a.b.c = d[e]", "a d e", ""),
    ("a[i] += 1", "a i", ""),
    ("x, (y, *z) = w\nprint(x, y, z)", "w", "x y z"),
    ("x: T = v", "T v", "x"),
    ("it = iter(loader)\nb = next(it)", "loader", "it b"),
    ("print(model.loss, 'x y', f'{v:{w}} {u!r}')", "model v w u", ""),
    ("import a.b, c as d\nfrom e import f\na, d, f", "", "a d f"),
    ("import torch.nn.functional as F\nF.relu(x)", "x", "F"),
    ("assert a, b", "a b", ""),
    ("global g\ng = 1\nprint(g)", "", "g"),
    ("eval('hidden + 1')", "", ""),
    # del
    ("del x", "x", ""),
    ("x = 1\ndel x", "", "x"),
    ("del x.y, z[0]", "x z", ""),
    # functions and scopes
    ("def f(a, b=c, *, d=e): return a + g", "c e g", "f"),
    ("def f():\n  x = 1\n  def g():\n    nonlocal x\n    x += h\n  return g", "h", "f"),
    ("def f():\n  global d\n  d = d + 1\nf()", "d", "f d"),
    ("def f():\n  global d\n  d = 1\n  return d", "", "f d"),
    ("@deco(arg)\ndef f(): return f()", "deco arg", "f"),
    ("f = lambda x, y=z: x + w", "z w", "f"),
    ("fs = [lambda: i + k for i in r]", "r k", "fs"),
    ("def even(n): return odd(n - 1)\ndef odd(n): return even(n - 1)", "odd", "even odd"),
    ("def f():\n  import os\n  from m import n\n  return os, n", "", "f"),
    ("def f():\n  global d\n  try: d = load()\n  except OSError: pass\n  return d", "load d", "f d"),
    ("def f():\n  global d\n  try:\n    load()\n    d = 1\n  finally: end()\n  return d", "load end d", "f d"),
    ("def f():\n  global d\n  with suppress(E): d = load()\n  return d", "suppress E load d", "f d"),
    ("def f():\n  global d\n  try: load()\n  except E: pass\n  d = 1\n  return d", "load E d", "f d"),
    ("def f():\n  global d\n  d = 1\n  try: load(d)\n  except E: pass\n  return d", "load E", "f d"),
    ("async def f():\n  global d\n  d = await g()\n  return d", "g d", "f d"),
    ("def f():\n  global d\n  d = 1\n  yield d", "", "f d"),
    # comprehensions
    ("z = [a(q) for q in qs if q > t]", "a qs t", "z"),
    ("z = {k: v for k, v in d.items() for w in u}", "d u", "z"),
    ("any(p(q) for q in qs)", "p qs", ""),
    ("[last := v for v in vs]\nprint(last)", "vs last", "last"),
    # classes
    ("class A(B, metaclass=M): pass", "B M", "A"),
    ("class A:\n  x = 1\n  y = x + z", "z", "A"),
    ("class A:\n  w = w", "w", "A"),
    ("class A:\n  def f(self, d=D): return super().f(self.g, h)", "D h", "A"),
    ("class A:\n  v = [q for q in qs]\n  def m(self): return __class__", "qs", "A"),
    ("class A:\n  def x(self): return 1\n  x = property(x)", "", "A"),
    ("class A:\n  def f(self): return A.n", "", "A"),
    ("class A:\n  n = A.n\n  class B: m = lambda: A", "A", "A"),
    ("def f(n=f): return f(n)", "f", "f"),
    ("@dataclass(frozen=True)\nclass C:\n  a: int = zero\n  b: T = field(default=1)", "dataclass zero T field", "C"),
    ("def f(b):\n  class L(b): k = c\n  return L", "c", "f"),
    # branches
    ("if c: x = 1\nprint(x)", "c x", "x"),
    ("if c: x = 1\nelse: x = 2\nprint(x)", "c", "x"),
    ("if c: x = 1\nelse: raise E\nprint(x)", "c E", "x"),
    ("if (m := f(s)) and m.group(): pass\nprint(m)", "f s", "m"),
    ("print(y := 3, y)", "", "y"),
    ("x = 1 if c else (y := 2)\nprint(x, y)", "c y", "x y"),
    # loops
    ("for x in xs: loss = f(x)\nprint(loss)", "xs f loss", "x loss"),
    ("for x in xs:\n  loss = f(x)\n  loss.backward()", "xs f", "x loss"),
    ("for i, (x, y) in enumerate(l): x + y\nelse: z", "l z", "i x y"),
    ("for a[i], b.c, d in e: d", "a i b e", "d"),
    ("while (c := r.read()): use(c)", "r use", "c"),
    ("for x in xs:\n  if x: continue\n  q = 1\n  q", "xs", "x q"),
    # with, try
    ("with open(p) as f, g() as (h, k[0]): f, h\nf, h", "p g k", "f h"),
    ("with autocast('cpu'): out = m(x)\nout", "autocast m x", "out"),
    ("with suppress(KeyError): out = m\nout", "suppress m out", "out"),
    ("try: x = f()\nexcept E as e: print(e)\nprint(x)", "f E x", "x e"),
    ("try: x = f()\nexcept E: x = 2\nprint(x)", "f E", "x"),
    ("try: x = f()\nexcept E: raise\nprint(x)", "f E", "x"),
    ("try: x = f()\nfinally: print(x)", "f x", "x"),
    ("try: x = f()\nfinally: y = 1\nx, y", "f", "x y"),
    ("try: pass\nexcept E: pass\nelse: x = 1\nx", "E x", "x"),
    # match
    ("match p:\n  case Point(x=0): r = 1\n  case _: r = 2\nr", "p Point", "r"),
    ("match p:\n  case [a, *rest] if a > t: r = a\n  case {'k': v, **o}: r = v\nr", "p t r", "a rest v o r"),
    ("match p:\n  case m.RED | 3 as q: q", "p m", "q"),
    # async
    ("x = await f()\nasync with a as b: b\nasync for c in d: c", "f a d", "x b c"),
    ("async def f():\n  async for x in g(): yield x, h", "g h", "f"),
    ("z = [x async for x in g() if await p(x)]", "g p", "z"),
    # star import
    ("from math import *\nsin(x)", "sin x", ""),
]


def words(text: str) -> set[str]:
    return set(text.split())


@pytest.mark.parametrize(("cell", "reads", "writes"), CELLS, ids=[cell for cell, _, _ in CELLS])
def test_cell(cell: str, reads: str, writes: str) -> None:
    names = analyse(cell)
    assert names.reads - BUILTIN == words(reads)
    assert names.writes == words(writes)


# as typed, transformed by IPython first
MAGICS: list[tuple[str, str, str]] = [
    ("%time y = f(x)", "f x", "y"),
    ("y = 2\n%time print(y)", "", "y"),
    ("%timeit -n 10 -r3 y = f(x)", "f x", ""),
    ("%prun -l 5 -s cumulative train(model)", "train model", ""),
    ("%lprun -f step train(model)", "step train model", ""),
    ("r = %timeit -o f(x)", "f x", "r"),
    ("%%time\na = b\nprint(a, c)", "b c", "a"),
    ("%%time\n%matplotlib inline\n!ls $folder\na = %time f(b)", "folder f b", "a"),
    ("%%timeit n = size\nf(n)", "size f", ""),
    ("%%capture out\n%%time\na = b", "b", "out a"),
    ("%%bash --out text\ncat $HOME {x}", "", "text"),
    ("!ls data", "", ""),
    ("!cp $src {str(dst)} $$PID && awk '{print $1}' f", "src dst", ""),
    ("files = !ls {folder}\nfiles", "folder", "files"),
    ("for d in ds:\n    !ls {d} $root", "ds root", "d"),
    ("%cd $folder", "folder", ""),
    ("model?", "", ""),
]


@pytest.mark.parametrize(("cell", "reads", "writes"), MAGICS, ids=[cell for cell, _, _ in MAGICS])
def test_magic(cell: str, reads: str, writes: str) -> None:
    transform = TransformerManager().transform_cell
    names = analyse(transform(cell))
    assert names.reads - BUILTIN == words(reads)
    assert names.writes == words(writes)
    assert not names.opaque


@pytest.mark.parametrize(("cell", "certain"), [
    ("f(x)\ny = x\ny", {"f": 1, "x": 1}),
    ("x = 1\nx", {}),
    ("n += 1", {"n": 1}),
    ("for a in b:\n  c\n  if a: break\n  d", {"b": 1, "c": 2}),
    ("for a in b:\n  if a: break\nd", {"b": 1, "d": 3}),
    ("for a in b:\n  old\n  old = a", {"b": 1, "old": 2}),
    ("with a as b:\n  c", {"a": 1, "c": 2}),
    ("with suppress(NameError):\n  del q\nz", {"suppress": 1, "NameError": 1, "z": 3}),
    ("if a:\n  b\nc", {"a": 1, "c": 3}),
    ("if a:\n  b = 1\nb", {"a": 1}),
    ("if a: raise b\nc", {"a": 1}),
    ("try:\n  a\nexcept b: pass\nc", {"c": 4}),
    ("a and b or c", {"a": 1}),
    ("x = a if b else c\n[d for e in f]\nlambda g=h: i", {"b": 1, "f": 2, "h": 3}),
    ("def f(a=b):\n  global d\n  d = c\nf()\nd", {"b": 1}),
    ("match a:\n  case 1: b\nc", {"a": 1, "c": 3}),
    ("get_ipython().run_cell_magic('time', '', 'a\\n\\nb\\n')", {"a": 2, "b": 4}),
    ("raise a\nb", {"a": 1}),
])  # fmt: skip
def test_certain(cell: str, certain: dict[str, int]) -> None:
    assert analyse(cell).certain == certain


@pytest.mark.parametrize(("cell", "opaque"), [
    ("from m import *", True),
    ("exec(text)", True),
    ("globals()['x'] = 1", True),
    ("get_ipython().run_line_magic('run', 'file.py')", True),
    ("get_ipython().run_line_magic('matplotlib', 'inline')", False),
    ("get_ipython().push({'x': 1})", True),
    ("shell = get_ipython()", True),
    ("model.exec(x)", False),
])  # fmt: skip
def test_opaque(cell: str, opaque: bool) -> None:
    assert analyse(cell).opaque is opaque


def test_deleted_and_errors_and_memory() -> None:
    assert analyse("x = 1\ndel x, y").deleted == {"x", "y"}
    assert analyse("for _ in r: In, _i3, __name__").reads == {"r", "In"}
    lists = {"In": ["a"], "_ih": None, "Out": 3, "_oh": {}}
    lists["_ih"] = lists["In"]
    assert reach(analyse("In, Out"), lists).hard == ("Out",), "In is IPython's list, and Out the notebook's own"
    assert own(lists) == ["Out"]
    assert analyse("a = b") is analyse("a = b")
    with pytest.raises(SyntaxError):
        analyse("a = = b")
    with pytest.raises(SyntaxError):
        analyse("return a")


@pytest.mark.parametrize("name", ["_", "__", "_12", "_i", "_i12", "_iii", "_oh", "__name__", "get_ipython"])
def test_private(name: str) -> None:
    assert private(name)
    assert not private(name + "put")


def test_a_deep_expression() -> None:
    assert analyse("x = " + " + ".join(["a"] * 900)).certain == {"a": 1}


def test_decoding_agrees_with_dis() -> None:
    """Bytecode changes with every Python: this says where."""

    def slow(code: types.CodeType, module: bool) -> tuple[set[str], set[str]]:
        loads = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"}
        reads, writes, bound, straight = set(), set(), set(), True
        found = dis.Bytecode(code)
        at = {instruction.offset: instruction.opname for instruction in found}
        entries = getattr(found, "exception_entries", ())  # since Python 3.11
        tried = [entry.start for entry in entries if at[entry.target] != "CALL_INTRINSIC_1"]
        for instruction in found:
            straight = straight and instruction.offset not in tried
            if instruction.opname in loads and instruction.argval not in bound:
                reads.add(instruction.argval)
            elif instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
                if module or instruction.opname == "STORE_GLOBAL":
                    writes.add(instruction.argval)
                if straight:
                    bound.add(instruction.argval)
            elif instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
                straight = False
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                inner = slow(constant, False)
                reads |= inner[0]
                writes |= inner[1]
        return reads, writes

    checked = 0
    for file in sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "[ac]*.py"))):
        with open(file, encoding="utf-8") as text:
            code = compile(text.read(), file, "exec", dont_inherit=True)
        assert tuple(code_names(code, module=True)) == slow(code, True), file
        checked += 1
    assert checked > 10


def notebook(source: str, **given: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__", **given}
    exec(compile(source, "<notebook>", "exec", dont_inherit=True), namespace)
    return namespace


def hard(cell: str, source: str, **given: Any) -> set[str]:
    return set(reach(analyse(cell), notebook(source, **given)).hard) - set(given)


G = "g = 1\n"

# cell, notebook, the hard names
REACHED: list[tuple[str, str, str]] = [
    ("f()", G + "def f(): return g", "f g"),
    ("f()", G + "def f(): return [q + g for q in ()]", "f g"),
    ("f()", G + "def f():\n def h(): return g\n return h()", "f g"),
    ("f()", G + "def h(): return g\ndef f(): return h()", "f h g"),
    ("even(3)", "def even(n): return n == 0 or odd(n-1)\ndef odd(n): return n and even(n-1)", "even odd"),
    ("f(3)", "def f(n): return f(n - 1)", "f"),
    ("f()", G + "h = lambda: g\ndef f(x=h): return x()\ndel h", "f g"),
    ("f()", G + "def f(*, x=lambda: g): return x()", "f g"),
    ("f()", G + "def make():\n  h = lambda: g\n  return lambda: h()\nf = make()", "f g"),
    ("f()", G + "def deco(h):\n  def w(): return h()\n  return w\n@deco\ndef f(): return g", "f g"),
    ("f()", G + "import functools\n@functools.lru_cache\ndef f(): return g", "f g"),
    ("f()", G + "import functools\nf = functools.partial(lambda x: g, 1)", "f g"),
    ("f()", G + "import functools\n@functools.singledispatch\ndef f(x): 0\n@f.register\ndef _(x: int): return g",
     "f g"),
    ("a", G + "class A:\n  def m(self): return g\na = A()", "a A g"),
    ("f()", G + "class A:\n  def m(self): return g\nf = A().m", "f A g"),
    ("A", G + "class B:\n  def m(self): return g\nclass A(B): pass\ndel B", "A g"),
    ("A", G + "class M(type):\n  def __call__(c): return g\nclass A(metaclass=M): pass\ndel M", "A g"),
    ("A", G + "class A:\n  @property\n  def p(self): return g", "A g"),
    ("A", G + "import functools\nclass A:\n  @functools.cached_property\n  def p(self): return g", "A g"),
    ("A", G + "class A:\n  @staticmethod\n  def p(): return g", "A g"),
    ("A", G + "class A:\n  @classmethod\n  def p(c): return g", "A g"),
    ("A", G + "class B: pass\nclass A(B):\n  def p(self): return super().p, B, g", "A B g"),
    ("a", G + "class A: pass\na = A()\na.f = lambda: g", "a A g"),
    ("a", G + "class A:\n  __slots__ = 'f', 'e'\na = A()\na.f = lambda: g", "a A g"),
    (
        "a",
        G + "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int = 0\n  def m(self): return g\na = A()",
        "a A g",
    ),
    ("fs", G + "fs = [{'k': (lambda: g, 1)}]", "fs g"),
    ("fs", G + "class A:\n  def m(self): return g\nfs = {A: 1}\ndel A", "fs g"),
    ("add(1)", G + "class L(list):\n  def m(self): return g\nadd = L().append", "add L g"),
    # under their own names too: pickle looks there
    ("a", "class A:\n  class B: pass\na = A.B()", "a A"),
    ("fs", "def f(): pass\nfs = [f]", "fs f"),
    ("a", "class A: pass\na = A()\nclass A: pass", "a"),
    ("d", G + "import collections\nd = collections.deque([lambda: g])", "d g"),
    ("d['x']", G + "import collections\nd = collections.defaultdict(lambda: g)", "d g"),
    ("d", G + "import collections\nd = collections.defaultdict(list, k=lambda: g)", "d g"),
    ("d", G + "import collections\nclass D(collections.defaultdict): pass\nd = D(lambda: g)", "d D g"),
    ("f()", "n = 0\ndef f():\n  global n\n  n += 1", "f n"),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "source", "expected"), REACHED, ids=[source for _, source, _ in REACHED])
def test_reached(cell: str, source: str, expected: str) -> None:
    assert hard(cell, source) == words(expected)


def test_the_functions_of_other_modules_are_opened_only_where_they_hold_ours() -> None:
    other: dict[str, Any] = {"__name__": "other"}
    exec("def wrap(f):\n  def w(): return f(), g\n  return w\ndef plain(): return g", other)
    assert hard("plain()", G, plain=other["plain"]) == set()
    assert hard("w()", G + "h = 2\nw = wrap(lambda: h)", wrap=other["wrap"]) == {"w", "h"}


def test_hard_and_soft() -> None:
    namespace = notebook(
        "n = 0\nloss = g = 1\ng2 = 2\ndef h(): return g, loss\ndef k(): return g2\nuse_both = h\ndef late(): return g2"
    )
    captured = reach(
        analyse("n += 1\nuse_both()\nfor x in []: loss = x\nprint(loss)\nif n: late = k\nlate()"), namespace
    )
    assert captured.hard == ("g", "g2", "h", "k", "use_both")  # in the namespace's order; g2 by way of k
    assert captured.soft == ("n", "loss", "late")
    only = reach(analyse("if c: late = 1\nlate()"), namespace)
    assert (only.hard, only.soft) == ((), ("g2", "late"))  # what only an assigned name leads to is soft too


def test_what_reached_functions_bind() -> None:
    namespace = notebook("n = 0\ndef f():\n  global n, cfg\n  n, cfg = n + 1, 2\ndef dirty(): exec('q = 1')")
    assert reach(analyse("f()\nprint(cfg)"), namespace).writes == {"n", "cfg"}
    assert not reach(analyse("f()"), namespace).opaque
    assert reach(analyse("dirty()"), namespace).opaque
    assert reach(analyse("x = f()"), namespace).writes == {"n", "cfg", "x"}


def test_missing_and_private_names_are_not_captured() -> None:
    namespace = notebook("_ = 1\n_i1 = ''\nIn = _ih = []\nOut = _oh = {}\nget_ipython = 3\nexit = quit = 4\nx = 5")
    namespace["open"] = functools.wraps(open)(lambda *a: 0)
    names = analyse("_, _i1, In, Out, exit, quit, x, y, open, __name__, print\nget_ipython()")
    assert reach(names, namespace).hard == ("exit", "quit", "x")  # a user's own `exit` is his
    namespace.update(exit=__import__("_sitebuiltins").Quitter("exit", "eof"), open=lambda: 0)
    assert reach(names, namespace).hard == ("quit", "x", "open")


def test_values_beside_the_cell() -> None:
    namespace = notebook("g = 1\nf = lambda: g")
    assert reach(CellNames(), namespace, values=[functools.partial(namespace["f"])]).hard == ("g",)


def test_nothing_of_the_users_is_called() -> None:
    source = """
class Loud:
    called = []
    def __getattr__(self, n): self.called.append(n); raise AttributeError(n)
    def __getattribute__(self, n): Loud.called.append(n); return object.__getattribute__(self, n)
    def __iter__(self): Loud.called.append('iter'); return iter(())
    def __len__(self): Loud.called.append('len'); return 0
    def __bool__(self): Loud.called.append('bool'); return False
    def __eq__(self, o): Loud.called.append('eq'); return False
    def __hash__(self): Loud.called.append('hash'); return 1
    @property
    def p(self): Loud.called.append('p'); return 1
class LoudList(Loud, list): pass
class LoudDict(Loud, dict):
    def values(self): Loud.called.append('values')
a = [Loud(), LoudList([Loud()]), LoudDict(k=Loud())]
"""
    namespace = notebook(source)
    assert set(reach(analyse("a"), namespace).hard) == {"a", "Loud", "LoudList", "LoudDict"}
    assert namespace["Loud"].called == []


def test_limits() -> None:
    namespace = notebook("g = h = 1\nshort = [lambda: g]\n")
    namespace["long"] = [0] * ELEMENTS + namespace["short"]
    assert reach(analyse("short"), namespace).hard == ("g", "short")
    assert reach(analyse("long"), namespace).hard == ("long",)
    chain: Any = namespace["short"]
    for _ in range(OBJECTS + 10):
        chain = [chain]
    namespace["chain"] = chain
    assert reach(analyse("chain"), namespace).hard == ("chain",)
    assert reach(analyse("chain, short"), namespace).hard == ("g", "short", "chain")


def test_an_object_that_holds_itself() -> None:
    assert hard("a", G + "class A:\n  def m(self): return g\na = A()\na.me = [a]") == {"a", "A", "g"}


def test_code_is_forgotten_with_its_function() -> None:
    from nbtrain.exchange.names import code_globals

    namespace = notebook("def f(): return 'only here 5471'")
    reach(analyse("f"), namespace)
    code = namespace["f"].__code__
    assert code in code_globals._KNOWN
    before = len(code_globals._KNOWN)
    del namespace["f"], code
    assert len(code_globals._KNOWN) < before


TORCH = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
scale, width, decay, shift = 2.0, 3, 0.5, 1
class Block(nn.Module):
    def __init__(self):
        super().__init__(); self.layer = nn.Linear(width, width)
    def forward(self, x): return self.layer(x) * scale
class Data(Dataset):
    def __len__(self): return width
    def __getitem__(self, i): return i + shift
def collate(rows): return rows, shift
model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.Sequential(Block())]))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: decay)
loader = DataLoader(Data(), collate_fn=collate)
hooked = nn.Linear(1, 1)
hooked.register_forward_hook(lambda *a: decay)
plain = nn.Linear(1, 1)
plain.table = torch.zeros(3)
"""


def test_torch_objects() -> None:
    assert hard("model(1)", TORCH) == {"model", "Block", "scale", "width", "nn"}
    assert hard("scheduler.step()", TORCH) == {"scheduler", "decay"}
    assert hard("for b in loader: b", TORCH) == {"loader", "Data", "collate", "width", "shift"}
    assert hard("hooked", TORCH) == {"hooked", "decay"}
    assert hard("plain", TORCH) == {"plain"}


def test_counter_and_namedtuple() -> None:
    point = collections.namedtuple("point", "f")
    record = dataclasses.make_dataclass("record", ["f"])
    source = G + "p = point(lambda: g)\nr = record(lambda: g)\nc = Counter([lambda: g])"
    given = {"point": point, "record": record, "Counter": collections.Counter}
    for name in "prc":
        assert hard(name, source, **given) == {name, "g"}
