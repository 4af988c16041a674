"""What the notebook defined works on the ranks as if it had been defined there, and what a cell there defined, here."""

from __future__ import annotations

import pytest

from tests.support.notebook import Notebook
from tests.support.story import notebook, play, warm_ranks

__all__ = ["notebook", "warm_ranks"]

pytestmark = pytest.mark.kernel


# Each story is said twice: everything defined here and used there, and the reverse.
BOTH_WAYS = {
    "super and __class__": (
        """
        class A:
            def __init__(self, n): self.n = n
            def m(self): return ['A']
            @classmethod
            def c(cls): return cls.__name__
            def who(self): return __class__
        class B(A):
            def m(self): return [*super().m(), 'B']
            @classmethod
            def c(cls): return super().c() + '!'
        class C(A):
            def m(self): return [*super().m(), 'C']
        class D(B, C):
            def m(self): return [*super(D, self).m(), 'D']
        d = D(3)""",
        "assert d.m() == ['A', 'C', 'B', 'D'] and D.c() == 'D!' and d.who() is A and D(4).n == 4",
    ),
    "dataclasses": (
        """
        from dataclasses import dataclass, field, fields, replace, asdict, KW_ONLY, InitVar
        @dataclass
        class Plain:
            x: int = 1
            items: list = field(default_factory=list, repr=False)
            _: KW_ONLY = None
            k: int = 2
            seed: InitVar[int] = 0
            def __post_init__(self, seed): self.made = seed
        @dataclass(frozen=True, slots=True, order=True)
        class Frozen:
            a: int
            b: tuple = ()
        @dataclass
        class Child(Plain): z: Frozen = Frozen(9)
        p = Plain(3, k=4, seed=5); f = Frozen(1, (2,)); c = Child()""",
        """
        assert (p.x, p.items, p.k, p.made) == (3, [], 4, 5) and [q.name for q in fields(p)] == ['x', 'items', 'k']
        assert f == Frozen(1, (2,)) and hash(f) == hash(Frozen(1, (2,))) and f < Frozen(2) and replace(f, a=7).a == 7
        assert c == Child() and Child().items is not Child().items and asdict(c)['z'] == {'a': 9, 'b': ()}
        try: f.a = 3
        except AttributeError: pass
        else: raise AssertionError('not frozen')
        assert not hasattr(f, '__dict__') and repr(p).startswith('Plain(x=3')""",
    ),
    "enums": (
        """
        import enum
        class Colour(enum.Enum):
            RED = 1
            BLUE = enum.auto()
            def up(self): return self.value + 1
            @classmethod
            def parse(cls, text): return cls[text.upper()]
        class Mode(str, enum.Enum):
            TRAIN = 'train'
        class Bits(enum.IntFlag):
            A = 1
            B = 2
        class Level(enum.IntEnum):
            LOW = 3
        held = {Colour.RED: [Bits.A | Bits.B, Level.LOW, Mode.TRAIN]}""",
        """
        assert held[Colour.RED] == [3, 3, 'train'] and held[Colour.RED][0] == Bits.A | Bits.B
        assert Bits.A in held[Colour.RED][0]
        assert Colour.parse('blue') is Colour.BLUE and Colour(2) is Colour.BLUE and Colour.BLUE.up() == 3
        assert list(Colour) == [Colour.RED, Colour.BLUE] and Mode('train') is Mode.TRAIN and Level.LOW + 1 == 4
        assert type(held[Colour.RED][0]) is Bits and next(iter(held)) is Colour.RED""",
    ),
    "named tuples": (
        """
        from collections import namedtuple
        from typing import NamedTuple
        Old = namedtuple('Old', 'x y', defaults=[5])
        class New(NamedTuple):
            a: int
            b: str = 'q'
            def both(self): return self.b * self.a
        class Below(Old):
            def total(self): return self.x + self.y
        o, n, b = Old(1), New(2), Below(3, 4)""",
        """
        assert o == (1, 5) and o._replace(x=7).x == 7 and n.both() == 'qq' and New(1)._asdict() == {'a': 1, 'b': 'q'}
        assert b.total() == 7 and type(b) is Below and type(o) is Old and type(n) is New
        assert Old._fields == ('x', 'y')""",
    ),
    "partials and dispatch": (
        """
        import functools
        base = 10
        def add(a, b, *, c=0): return a + b + c + base
        part = functools.partial(add, 1, c=2)
        class A:
            def go(self, n, m): return n * m
            twice = functools.partialmethod(go, 2)
            @functools.singledispatchmethod
            def kind(self, v): return 'any'
            @kind.register
            def _(self, v: int): return 'int'
        @functools.singledispatch
        def kind(v): return 'any'
        @kind.register(list)
        def as_list(v): return 'list'
        @functools.total_ordering
        class T:
            def __init__(self, v): self.v = v
            def __eq__(self, o): return self.v == o.v
            def __lt__(self, o): return self.v < o.v
        a = A()""",
        """
        assert part(3) == 16 and a.twice(4) == 8 and kind([]) == 'list' and kind(1) == 'any'
        assert a.kind('') == 'any' and a.kind(3) == 'int' and T(2) >= T(1)
        @kind.register(bytes)
        def as_bytes(v): return 'bytes'
        assert kind(b'') == 'bytes' and part.func is add""",
    ),
    "caches": (
        """
        import functools
        calls = []
        @functools.lru_cache(maxsize=7)
        def slow(n): calls.append(n); return n * 2
        @functools.cache
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        class A:
            @functools.cached_property
            def heavy(self): calls.append('heavy'); return [1]
            @functools.lru_cache
            def m(self, n): return n + 1
        a = A()""",
        """
        before = len(calls)
        assert slow(3) == slow(3) == 6 and len(calls) - before <= 1 and slow.cache_parameters()['maxsize'] == 7
        assert fib(30) == 832040 and a.heavy is a.heavy and a.m(1) == 2
        assert calls.count('heavy') == 1""",
    ),
    "typing": (
        """
        from typing import Generic, TypeVar, Protocol, TypedDict, NewType, Literal, Optional
        from typing import get_type_hints, runtime_checkable
        T = TypeVar('T')
        class Box(Generic[T]):
            def __init__(self, v: T): self.v = v
        class Deep(Box[list[T]]): pass
        @runtime_checkable
        class Runs(Protocol):
            def run(self) -> int: ...
        class Runner:
            def run(self): return 1
        class Options(TypedDict, total=False):
            lr: float
        Id = NewType('Id', int)
        Kind = Optional[Literal['a', 'b']]
        box, deep, opts, ident = Box[int](1), Deep[str](['x']), Options(lr=0.1), Id(3)
        def f(a: Box[int], b: Kind = None) -> Id: return Id(a.v)""",
        """
        assert box.v == 1 and isinstance(deep, Box) and Box[int].__origin__ is Box
        assert Deep.__orig_bases__[0].__origin__ is Box
        assert isinstance(Runner(), Runs) and not isinstance(3, Runs) and opts == {'lr': 0.1}
        assert Options.__total__ is False
        assert ident == 3 and Id.__supertype__ is int and get_type_hints(f)['a'] == Box[int] and f(box) == 1
        assert Options.__annotations__['lr'] is float and Box.__parameters__ == (T,)""",
    ),
    "abstract classes and metaclasses": (
        """
        import abc
        class Abstract(abc.ABC):
            @abc.abstractmethod
            def f(self): ...
            @property
            @abc.abstractmethod
            def p(self): ...
        class Real(Abstract):
            def f(self): return 1
            p = 2
        class Meta(type):
            made = []
            def __call__(cls, *a):
                one = super().__call__(*a); Meta.made.append(cls.__name__); return one
            @property
            def size(cls): return len(cls.__name__)
        class M(metaclass=Meta):
            def __init__(self, v=0): self.v = v
        class Solo(metaclass=Meta):
            _one = None
            def __new__(cls):
                cls._one = cls._one or super().__new__(cls); return cls._one
        class Slotted:
            __slots__ = ('a', '__b', '__weakref__')
            def __init__(self): self.a, self.__b = 1, 2
            def b(self): return self.__b
        r, m, solo, sl = Real(), M(3), Solo(), Slotted()""",
        """
        assert r.f() == 1 and isinstance(r, Abstract) and Real().p == 2
        try: Abstract()
        except TypeError: pass
        else: raise AssertionError('not abstract')
        assert type(M) is Meta and M.size == 1 and M(4).v == 4 and m.v == 3 and Meta.made[-1] == 'M'
        assert Solo() is solo and sl.b() == 2 and Slotted().a == 1 and not hasattr(sl, '__dict__')""",
    ),
    "descriptors": (
        """
        class Field:
            def __init__(self, default): self.default = default
            def __set_name__(self, owner, name): self.name, self.names = name, [*getattr(self, 'names', ()), name]
            def __get__(self, obj, kind=None): return self if obj is None else obj.__dict__.get(self.name, self.default)
            def __set__(self, obj, value): obj.__dict__[self.name] = value * 2
        class A:
            x = Field(7)
            def __getattr__(self, name):
                if name.startswith('__'): raise AttributeError(name)
                return 'got ' + name
            def __getitem__(self, i): return i
            def __call__(self, v): return v
            def __len__(self): return 0
            def __bool__(self): return False
            def __eq__(self, o): return type(o) is A
            __hash__ = None
        a = A(); a.x = 4""",
        """
        assert a.x == 8 and A().x == 7 and A.x.names == ['x'] and a.zzz == 'got zzz' and a[3] == 3 and a(5) == 5
        assert a == A() and not a and A.__hash__ is None""",
    ),
    "torch functions and modules": (
        """
        import torch
        from torch import nn
        from torch.nn.utils import parametrize
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): ctx.save_for_backward(x); return x * factor
            @staticmethod
            def backward(ctx, g): return g * factor
        factor = 2
        class Sym(nn.Module):
            def forward(self, w): return w.triu() + w.triu(1).transpose(-1, -2)
        class Net(nn.Module):
            calls = 0
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(3, 3, bias=False); self.register_buffer('n', torch.zeros(1)); self.log = []
                parametrize.register_parametrization(self.lin, 'weight', Sym())
                self.lin.register_forward_hook(lambda m, i, o: self.log.append(tuple(o.shape)))
                self.register_full_backward_hook(self.noted)
            def noted(self, m, gi, go): self.log.append('back')
            def forward(self, x): Net.calls += 1; return Double.apply(self.lin(x))
        @torch.no_grad()
        def frozen(m, x): return m(x)
        @torch.inference_mode()
        def inferred(m, x): return m(x)
        torch.manual_seed(0); net = Net()""",
        """
        before = len(net.log), Net.calls
        w = net.lin.weight
        assert torch.equal(w, w.T) and not frozen(net, torch.ones(1, 3)).requires_grad
        assert inferred(net, torch.ones(1, 3)).is_inference()
        x = torch.ones(1, 3, requires_grad=True)
        net(x).sum().backward()
        assert torch.allclose(x.grad, 2 * w.sum(0)), (x.grad, w)
        assert net.log[before[0]:] == [(1, 3)] * 3 + ['back'] and Net.calls == before[1] + 3
        assert list(net.state_dict()) == ['n', 'lin.parametrizations.weight.original']
        assert parametrize.is_parametrized(net.lin)
        net.log.clear()""",
    ),
}


@pytest.mark.sample(first=7)
@pytest.mark.parametrize(("made", "used"), BOTH_WAYS.values(), ids=list(BOTH_WAYS))
def test_both_ways(notebook: Notebook, made: str, used: str) -> None:
    play(notebook, f"{made}\n--- ranks\n{used}\n--- here\n{used}".replace("\n        ", "\n"))
    notebook.kernel.run("%reset -f")
    play(notebook, f"--- ranks\n{made}\n{used}\n--- here\n{used}\n--- ranks\n{used}".replace("\n        ", "\n"))


STORIES = {
    "registries over three cells": """
        class Plugin:
            registry = []; runs = 0
            def __init_subclass__(cls, tag=None, **kw):
                super().__init_subclass__(**kw); Plugin.runs += 1; Plugin.registry.append((tag or cls.__name__, cls))
        class A(Plugin): pass
        --- ranks
        assert Plugin.registry == [('A', A)] and Plugin.runs == 1
        class B(Plugin, tag='bee'): pass
        --- here
        assert Plugin.registry == [('A', A), ('bee', B)] and Plugin.runs == 2
        class C(A): pass
        --- ranks
        assert Plugin.registry == [('A', A), ('bee', B), ('C', C)] and Plugin.runs == 3
        class D(C): pass
        --- here
        assert [n for n, _ in Plugin.registry] == ['A', 'bee', 'C', 'D'] and Plugin.runs == 4
        assert Plugin.registry[3][1] is D and issubclass(D, A) and D.__subclasses__() == []
        assert D in C.__subclasses__()""",
    "a class redefined between cells": """
        class Net:
            def __init__(self): self.v = 1
            def m(self): return 'old'
        old = Net(); Old = Net
        --- ranks
        assert old.m() == 'old' and type(old) is Net
        --- here
        class Net:
            def __init__(self): self.v = 2
            def m(self): return 'new'
        new = Net()
        assert not isinstance(old, Net)
        --- ranks
        assert new.m() == 'new' and old.m() == 'old' and isinstance(new, Net) and not isinstance(old, Net)
        assert isinstance(old, Old) and type(old) is Old
        old.v = 5; made = Net()
        --- here
        assert old.m() == 'old' and old.v == 5 and type(old) is Old and made.m() == 'new' and type(made) is Net
        --- ranks
        class Net:
            def m(self): return 'newest'
        newest = Net()
        assert new.m() == 'new' and not isinstance(new, Net)
        --- here
        assert newest.m() == 'newest' and type(newest) is Net and new.m() == 'new' and not isinstance(new, Net)""",
    "a class made in a cell, used here": """
        import pickle, inspect, copy
        --- ranks
        class Made:
            kept = []
            def __init__(self, v): self.v = v; self.kept.append(v)
            def m(self):
                return self.v + 1  # a line to be found
        first = Made(1)
        --- here
        second = Made(2)
        assert isinstance(first, Made) and type(first) is Made and Made.kept == [1, 2] and first.kept is Made.kept
        assert pickle.loads(pickle.dumps(first)).v == 1 and copy.deepcopy(second).m() == 3
        assert '# a line to be found' in inspect.getsource(Made.m) and Made.__module__ == '__main__'
        class Below(Made):
            def m(self): return super().m() * 10
        third = Below(3)
        --- ranks
        assert isinstance(third, Made) and third.m() == 40 and second.m() == 3 and Made.kept == [1, 2, 3]
        assert type(first) is Made and pickle.loads(pickle.dumps(third)).v == 3
        Made.kept.clear()
        --- here
        assert Made.kept == [] and third.kept is Made.kept""",
    "inspect.getsource on ranks": """
        import inspect
        def helper(x):
            return x + 1  # a comment that only the source has
        class C:
            def m(self):
                return 2  # another one
        --- ranks
        assert '# a comment that only the source has' in inspect.getsource(helper)
        assert '# another one' in inspect.getsource(C.m)
        def own():
            return 3  # of the rank
        assert '# of the rank' in inspect.getsource(own)
        --- here
        assert '# of the rank' in inspect.getsource(own)""",
    "methods and attributes changed between cells": """
        class A:
            n = 1
            def m(self): return 'first'
            @property
            def p(self): return 1
        a = A()
        --- ranks
        assert a.m() == 'first' and A.n == 1
        --- here
        A.m = lambda self: 'second'; A.n = 2; A.extra = [1]; A.p = property(lambda self: 2)
        --- ranks
        assert (a.m(), A.n, A.extra, a.p) == ('second', 2, [1], 2)
        A.m = lambda self: 'third'; A.n += 1; A.extra.append(2); A.q = classmethod(lambda cls: cls)
        --- here
        assert (a.m(), A.n, A.extra, A.q()) == ('third', 3, [1, 2], A)
        del A.extra, A.n
        a.m = lambda: 'its own'
        --- ranks
        assert not hasattr(A, 'extra') and not hasattr(A, 'n') and a.m() == 'its own' and A().m() == 'third'
        del a.m, A.p
        --- here
        assert a.m() == 'third' and not hasattr(A, 'p')""",
    "functions edited between cells": """
        def f(a, b=1): return a + b
        g = f
        --- ranks
        assert f(1) == 2
        --- here
        f.__defaults__ = (10,); f.note = ['x']; f.__doc__ = 'says'
        --- ranks
        assert f(1) == 11 and f.note == ['x'] and f.__doc__ == 'says' and g is f
        f.note.append('y'); f.__kwdefaults__ = None; f.more = 1
        --- here
        assert f.note == ['x', 'y'] and f.more == 1 and g is f
        def f(a): return -a
        --- ranks
        assert f(1) == -1 and g(1) == 11 and f is not g""",
    "modules made in a cell": """
        import torch; from torch import nn
        --- ranks
        class Layer(nn.Module):
            def __init__(self):
                super().__init__(); self.w = nn.Parameter(torch.ones(2))
            def forward(self, x): return x * self.w * gain
        gain = 3
        layer = Layer().requires_grad_(False)
        --- here
        assert layer(1).tolist() == [3, 3] and isinstance(layer, Layer) and type(layer.w) is nn.Parameter
        gain = 4; net = nn.Sequential(Layer(), layer).requires_grad_(False)
        --- ranks
        assert net(1).tolist() == [16, 16] and net[1] is layer
        Layer.forward = lambda self, x: x - self.w
        --- here
        assert net(1).tolist() == [-1, -1]""",
    "identity of what a closure and a default hold": """
        shared = []
        def make():
            here_ = shared
            def add(v, to=shared): here_.append(v); return to is here_ is shared
            return add
        add = make()
        --- ranks
        same = add(1)
        --- here
        assert same and add(2) and shared == [1, 2] and add.__defaults__[0] is shared
        --- ranks
        assert add(3) and shared == [1, 2, 3]""",
    "subclasses of built-in and library types": """
        import collections, torch
        class L(list):
            def total(self): return sum(self)
        class D(dict):
            def __missing__(self, k): return k
        class U(collections.UserDict): pass
        class S(str):
            def shout(self): return self.upper()
        class I(int): pass
        class T(tuple):
            def __new__(cls, *v): return super().__new__(cls, v)
        l, d, u, s, i, t = L([1, 2]), D(a=1), U(a=1), S('x'), I(3), T(1, 2); l.note = 'n'; s.tag = 't'; al = l
        --- ranks
        assert l.total() == 3 and l.note == 'n' and d['q'] == 'q' and u['a'] == 1 and s.shout() == 'X'
        assert i + 1 == 4 and t == (1, 2)
        assert [type(v).__name__ for v in (l, d, u, s, i, t)] == ['L', 'D', 'U', 'S', 'I', 'T'] and s.tag == 't'
        assert al is l
        l.append(4); d['b'] = 2; u['c'] = 3; l.note = 'm'
        --- here
        assert list(l) == [1, 2, 4] and d == {'a': 1, 'b': 2} and dict(u) == {'a': 1, 'c': 3} and l.note == 'm'
        assert al is l and type(l) is L and type(d) is D and type(s) is S""",
}


@pytest.mark.sample(first=6)
@pytest.mark.parametrize("story", STORIES.values(), ids=list(STORIES))
def test_over_cells(notebook: Notebook, story: str) -> None:
    play(notebook, story)


def test_tracebacks_show_the_lines_of_cells(notebook: Notebook) -> None:
    notebook("def helper(v):\n    return 1 / v  # here it happens")
    notebook("class A:\n    def m(self): return helper(0)  # from here\na = A()")
    trace = notebook.fails("%%distributed --devices 2\nx = 1\na.m()  # the cell").traceback
    for line in ("# here it happens", "# from here", "# the cell", "ZeroDivisionError"):
        assert line in trace, trace
    notebook("%%distributed --devices 2\ndef on_ranks():\n    raise KeyError('made there')  # its line")
    trace = notebook.fails("on_ranks()").traceback
    assert "# its line" in trace, trace
