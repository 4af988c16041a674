"""What is set on an object that both sides have, beside its ordinary attributes: hooks, classes, factories.

Each edit is made in the notebook and on a rank, and the other side has to have it.
"""

from __future__ import annotations

import pytest

from tests.support.sides import Sides

# what is edited: the cell that makes it, the edit, what holds after it on the other side
CASES: dict[str, tuple[str, str, str]] = {
    "a hook that moves to a table that was empty": (
        """
        from torch import nn
        def g(*a): return None
        m = nn.Linear(2, 2); h = m.register_forward_hook(g)
        """,
        "h.remove(); h = m.register_forward_pre_hook(g)",
        "not m._forward_hooks and list(m._forward_pre_hooks) == [h.id] and h.hooks_dict_ref() is m._forward_pre_hooks",
    ),
    "the factory of a defaultdict": (
        "from collections import defaultdict\ndd = defaultdict(list, x=[1]); x = dd['x']",
        "dd.default_factory = None",
        "dd.default_factory is None and dd == {'x': [1]} and dd['x'] is x",
    ),
    "the factory of a defaultdict, which its own closure leads back to": (
        """
        from collections import defaultdict
        def make():
            made = defaultdict(lambda: len(made))
            return made
        dd = make()
        """,
        "dd['a']; dd['b']",
        "dd == {'a': 0, 'b': 1} and dd.default_factory.__closure__[0].cell_contents is dd",
    ),
    "a hook taken off a module with a __setstate__ of its own": (
        "from torch import nn\nm = nn.LSTM(2, 2); m.register_forward_hook(print)",
        "m._forward_hooks.clear()",
        "not m._forward_hooks",
    ),
    "an attribute of a module that packs all but its lock": (
        """
        import threading
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__(); self.lock = threading.Lock(); self.layer = nn.Linear(1, 1); self.old = 1
            def __getstate__(self):
                state = self.__dict__.copy(); state.pop("lock", None); return state
        net = Net()
        """,
        "net.epoch = 3; del net.old",
        "net.epoch == 3 and not hasattr(net, 'old')",
    ),
    "an attribute taken off an object that packs and unpacks itself": (
        """
        import threading
        class State:
            def __init__(self): self.lock = threading.Lock(); self.x = self.y = 1
            def __getstate__(self): return {k: v for k, v in self.__dict__.items() if k != "lock"}
            def __setstate__(self, state): self.__dict__.update(state); self.lock = threading.Lock()
        s = State()
        """,
        "del s.x; s.z = 2",
        "not hasattr(s, 'x') and s.y == 1 and s.z == 2 and s.lock",
    ),
    "a parametrization of a module that has one": (
        """
        import torch
        from torch import nn
        from torch.nn.utils import parametrize
        from torch.nn.utils.parametrizations import weight_norm
        pn = weight_norm(nn.Linear(2, 2)); x = torch.ones(1, 2)
        """,
        "parametrize.register_parametrization(pn, 'bias', nn.ReLU())",
        "pn(x).shape == (1, 2) and bool((pn.bias >= 0).all()) and list(pn.parametrizations) == ['weight', 'bias']",
    ),
    "the only parametrization taken off": (
        """
        import io, torch
        from torch import nn
        from torch.nn.utils import parametrize
        qn = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.ReLU())
        """,
        "parametrize.remove_parametrizations(qn, 'weight')",
        "type(qn) is nn.Linear and not hasattr(qn, 'parametrizations') and torch.save(qn, io.BytesIO()) is None",
    ),
    "the first parametrization": (
        "import torch\nfrom torch import nn\nfrom torch.nn.utils import parametrize\npn = nn.Linear(2, 2)",
        "parametrize.register_parametrization(pn, 'weight', nn.ReLU())",
        "bool((pn.weight >= 0).all()) and isinstance(pn, nn.Linear) and type(pn) is not nn.Linear",
    ),
    "the class of an instance": (
        """
        class A:
            def f(self): return 'A'
        class B(A):
            def f(self): return 'B'
        a = A(); a.x = [1]
        """,
        "a.__class__ = B",
        "type(a) is B and a.f() == 'B' and a.x == [1]",
    ),
    "the class of an instance, which only the cell defines": (
        "class A: pass\na = A()",
        """
        class B(A):
            def f(self): return 'B'
        a.__class__ = B
        del B
        """,
        "a.f() == 'B' and type(a) is not A",
    ),
    "the class of a module": (
        """
        from torch import nn
        class Twice(nn.Linear):
            def forward(self, x): return 2 * super().forward(x)
        m = nn.Linear(1, 1)
        """,
        "m.__class__ = Twice",
        "type(m) is Twice",
    ),
    "lazy layers that get their shape": (
        """
        import torch
        from torch import nn
        lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()); x = torch.ones(2, 3)
        """,
        "lazy(x)",
        "list(map(type, lazy)) == [nn.Linear, nn.BatchNorm1d] and lazy[0].weight.shape == (4, 3)"
        " and type(lazy[0].weight) is nn.Parameter and lazy[0](x).shape == (2, 4) and not lazy[0]._forward_pre_hooks",
    ),
    "attributes of a cached function": (
        "import functools\n@functools.lru_cache\ndef f(x): return x\nf.n = 0; f.log = log = []; f.gone = 1",
        "f.n = 5; f.log.append(1); del f.gone",
        "f.n == 5 and f.log is log and log == [1] and not hasattr(f, 'gone') and f(2) == 2 and f.__name__ == 'f'",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_set_in_the_notebook(sides: Sides, case: tuple[str, str, str]) -> None:
    cell, edit, holds = case
    sides.run(cell)
    sides.distributed("")
    sides.run(edit)
    assert sides(holds)
    assert sides.unsent() != []
    sides.out()
    assert sides.there(holds)
    sides.home()
    assert sides.unsent() == sides.unsent_there() == []
    assert sides(holds)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_set_on_a_rank(sides: Sides, case: tuple[str, str, str]) -> None:
    cell, edit, holds = case
    sides.run(cell)
    sides.distributed("")
    sides.distributed(edit)
    assert sides.there(holds)
    assert sides(holds)
    assert sides.unsent() == sides.unsent_there() == []


@pytest.mark.parametrize("base", ["", "nn.Module"])
def test_what_a_class_leaves_out_of_its_state_stays_where_it_is(sides: Sides, base: str) -> None:
    sides.run(f"""
        import threading
        from torch import nn
        class Net({base}):
            def __init__(self):
                super().__init__(); self.lock = threading.Lock(); self.epoch = 1
            def __getstate__(self):
                state = self.__dict__.copy(); del state["lock"]; state.pop("_forward_hooks", None); return state
        net = Net(); _lock = net.lock
        if isinstance(net, nn.Module): net.register_forward_hook(print)
    """)
    sides.distributed("net.lock = threading.Lock()")
    sides.distributed("net.epoch = 3; net.more = 4; there = net.lock.locked()")
    assert sides("net.epoch == 3 and net.more == 4 and net.lock is _lock")
    assert sides("len(vars(net).get('_forward_hooks', [0]))") == 1
    assert sides("there") is False
    sides.run("net.epoch = 5; del net.more")
    sides.distributed("there = net.lock.locked()")
    assert sides.there("net.epoch == 5 and not hasattr(net, 'more')")
