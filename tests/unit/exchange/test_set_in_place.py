"""What is set on an object that both sides have, beside its ordinary attributes: hooks, classes, factories.

Each edit is made in the notebook and on a rank, and the other side has to have it.
"""

from __future__ import annotations

import pytest

from nbtrain.base.errors import CannotTravel
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


@pytest.mark.parametrize("state", ["{'pattern': self.pattern}", "(self.pattern,)"])
def test_a_module_that_is_made_anew_from_its_state_is_the_notebooks_all_the_same(sides: Sides, state: str) -> None:
    """einops' layers leave all of torch's tables out of their state, and call `__init__` with what they give."""
    sides.run(f"""
        import torch
        from torch import nn
        class Rearranged(nn.Module):
            def __init__(self, pattern):
                super().__init__(); self.pattern = pattern; self.parts = pattern.split(); self.inner = nn.Linear(1, 1)
            def __getstate__(self): return {state}
            def __setstate__(self, state): self.__init__(*(state.values() if isinstance(state, dict) else state))
        layer = Rearranged("b c"); _inner, _weight = layer.inner, layer.inner.weight
        layer.eval(); layer.register_forward_hook(lambda *_: None)
    """)
    sides.distributed("seen = layer.parts, layer.training, len(layer._forward_hooks), layer.inner.weight.clone()")
    assert sides("seen[:3] == (['b', 'c'], False, 1) and torch.equal(seen[3], _weight)")
    if state.startswith("{"):  # what is no dict is made for each look
        assert sides.unsent() == sides.unsent_there() == []
    sides.distributed("layer.train(); layer.inner.weight.data.fill_(7.0)")
    assert sides("layer.training and layer.inner is _inner and layer.inner.weight is _weight and _weight.item() == 7")
    sides.run("layer.pattern = 'b c h'; layer._forward_hooks.clear()")
    sides.distributed("seen = layer.parts, len(layer._forward_hooks), layer.inner.weight.item()")
    assert sides("seen == (['b', 'c', 'h'], 0, 7.0)")


def test_empty_tables_of_hooks_that_a_class_of_others_has(sides: Sides) -> None:
    """Every `MessagePassing` of PyTorch Geometric has eight."""
    sides.run("""
        from collections import OrderedDict
        import torch
        from torch import nn
        class Passing(nn.Module):
            def __init__(self): super().__init__(); self._propagate_forward_pre_hooks = OrderedDict()
        class Own(torch.optim.SGD):
            def __init__(self, *args): super().__init__(*args); self.my_hooks = []
        layer = Passing(); opt = Own([torch.ones(1, requires_grad=True)], 0.1)
    """)
    sides.distributed("seen = layer._propagate_forward_pre_hooks, opt.my_hooks")
    assert sides("seen[0] is layer._propagate_forward_pre_hooks and seen[1] is opt.my_hooks")
    sides.distributed("layer._propagate_forward_pre_hooks[1] = print; opt.my_hooks.append(1)")
    sides.distributed("layer._propagate_forward_pre_hooks.clear(); opt.my_hooks.clear()")
    assert sides("not layer._propagate_forward_pre_hooks and opt.my_hooks == []")


@pytest.mark.parametrize("cache", ["lru_cache", "cache", "lru_cache(maxsize=2)"])
def test_a_model_behind_a_cache_is_refused_and_other_results_are_computed_again(sides: Sides, cache: str) -> None:
    """Whichever side has called the function first."""
    sides.run(f"""
        import functools, torch
        from torch import nn
        @functools.{cache}
        def get_model(width=1): return nn.Linear(width, 1)
        @functools.{cache}
        def weights(model, n): return [n, sum(p.numel() for p in model.parameters())]
        model = nn.Linear(2, 1)
        there = weights(model, 3)
    """)
    sides.distributed("there = weights(model, 3)")
    assert sides("there == [3, 3] and weights.cache_info().currsize == 1"), "an argument is no result"
    home = sides.distributed("get_model(2).weight.data += 1")
    assert any("its lru_cache keeps a Linear" in str(left) for left in home.stayed)
    sides.run("_model = get_model(2)")
    with pytest.raises(CannotTravel, match=r"its lru_cache keeps a Linear.*\(model = get_model\(\)\)"):
        sides.distributed("get_model(2)")


IDS = {
    "a dict": "scales = {id(p): 0.1 for p in model.parameters()}",
    "a set": "scales = set(map(id, model.parameters()))",
    "a frozenset": "scales = frozenset(map(id, model.parameters()))",
    "a tuple": "scales = 1, (0, id(model.weight))",
    "a long one": "scales = (*range(300), id(model.weight))",
    "pairs": "scales = [(id(p), 0.1) for p in model.parameters()]",
    "a frozenset in a dict": "scales = {'kept': frozenset(map(id, model.parameters()))}",
    "a tuple of an object's": "import types\nscales = types.SimpleNamespace(first=(id(model.weight), 0.1))",
    "a list of an object's": "import types\nscales = types.SimpleNamespace(first=[0, id(model.weight)])",
}


@pytest.mark.parametrize("made", IDS.values(), ids=IDS)
@pytest.mark.parametrize("names", [["scales", "model"], ["model", "scales"]])
def test_ids_of_parameters_match_nothing_on_ranks(sides: Sides, made: str, names: list[str]) -> None:
    sides.run("from torch import nn\nmodel = nn.Linear(1, 1)")
    sides.distributed("ids = {id(model.weight): 1}")
    sides.distributed("found = ids.get(id(model.weight)), {id(p) for p in model.parameters()}")
    assert sides("found[0]") == 1, "what the ranks have made is theirs"
    sides.run(made)
    with pytest.raises(
        CannotTravel, match=r"scales.* cannot travel to the ranks: it holds id\(…\) of a Parameter"
    ) as told:
        sides.out(names)
    assert "make it inside the cell, or use the object itself as the key, {p: …}, or its name" in str(told.value)
    sides.run("scales = {p: 0.1 for p in model.parameters()}, [2**40, 0], {2**41: 1}")
    sides.distributed("found = sum(map(scales[0].get, model.parameters())), scales[1][0] + 1")
    assert sides("found") == (0.2, 2**40 + 1)
