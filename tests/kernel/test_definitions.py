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
