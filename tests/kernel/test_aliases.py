"""Who is identical with whom in the notebook stays so, whatever kind of object it is."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.story import notebook, play, warm_ranks  # noqa: F401

CASES = {
    "a DataFrame that hangs in several places": """
        import pandas as pd
        class Data: pass
        df = pd.DataFrame({"a": [1, 2, 3]}, index=list("xyz")); ds = Data(); ds.df = df; cfg = {"df": df}; alias = df
        --- ranks
        df.loc["x", "a"] = 10; df["b"] = df.a * 2; df.index.name = "i"
        df.drop(index="z", inplace=True)
        --- here
        assert df is ds.df is cfg["df"] is alias
        assert list(alias.b) == [20, 4] and alias.index.name == "i" and list(ds.df.index) == ["x", "y"]
        assert alias.a.sum() == 12 and alias.groupby("b").a.sum().loc[20] == 10
        alias.loc["y", "a"] = 0
        --- ranks
        assert ds.df is cfg["df"] and ds.df.a.sum() == 10
        ds.df["c"] = 1
        --- here
        assert list(alias.columns) == ["a", "b", "c"] and df is ds.df is cfg["df"] is alias""",
    "an object with its own __reduce__": """
        class Own:
            def __init__(self, n): self.n = n
            def __reduce__(self): return Own, (self.n,)
        class Slots:
            __slots__ = ("n",)
            def __init__(self, n): self.n = n
            def __reduce__(self): return Slots, (self.n,)
        o, p = Own(1), Slots(1); held = [o, {"p": p}]; q = p
        --- ranks
        o.n = 2; p.n = 3
        --- here
        assert o is held[0] and o.n == 2 and q is p is held[1]["p"] and q.n == 3""",
    "a subclass of ndarray": """
        import numpy as np
        class Unit(np.ndarray):
            def __array_finalize__(self, obj): self.unit = getattr(obj, "unit", None)
        u = np.arange(3.0).view(Unit); u.unit = "m"; v = u; held = {"u": u}
        --- ranks
        assert type(u) is Unit and u.unit == "m", u.unit
        u[0] = 7; u.note = [1]
        --- here
        assert u is v is held["u"] and type(v) is Unit and v.unit == "m" and v.note == [1] and v[0] == 7
        u.unit = "s"
        --- ranks
        assert u.unit == "s" and u[0] == 7
        u = u * 2
        --- here
        assert u.unit == "s" and u[0] == 14 and v[0] == 7""",
    "what a module keeps as the one of its kind": """
        import argparse, dataclasses, inspect, contextlib
        parser = argparse.ArgumentParser(); parser.add_argument("--a", default=argparse.SUPPRESS)
        from functools import _initial_missing
        kept = {"s": argparse.SUPPRESS, "m": dataclasses.MISSING, "e": inspect.Parameter.empty, "o": _initial_missing}
        --- ranks
        import argparse, dataclasses, functools, inspect
        assert kept["s"] is argparse.SUPPRESS and kept["m"] is dataclasses.MISSING
        assert kept["e"] is inspect.Parameter.empty and kept["o"] is functools._initial_missing
        assert vars(parser.parse_args([])) == {}
        home = [argparse.SUPPRESS, functools._initial_missing]
        --- here
        assert home[0] is argparse.SUPPRESS and home[1] is _initial_missing""",
}


@pytest.mark.sample(first=3)
@pytest.mark.parametrize("name", CASES)
def test_aliases(notebook: Notebook, name: str) -> None:  # noqa: F811
    play(notebook, CASES[name])


# --- what shares a weight's memory -----------------------------------------------------------------------------------

OF_WEIGHTS = """
import pytest
class Own: pass
def aliases(m):
    own = Own(); own.w = m[0].weight.detach()
    return {
        "datas": [p.data for p in m.parameters()], "state": m.state_dict(), "detach": m[0].weight.detach(),
        "rows": m[0].weight.data[1:3], "column": m[0].weight.data[:, 2], "columns": m[0].weight.data[:, 1:3],
        "flat": m[0].weight.data.view(-1),
        "turned": {"t": m[0].weight.detach().t()}, "own": own, "buffer": m[1].running_mean.detach(),
        "tied": (m[3].weight.detach(),), "frozen": m[2].bias.detach(), "crossed": m[4].weight.data[1:, :3],
        "average": [p.detach().clone() for p in m.parameters()],
    }
def tensors(a):
    return {"datas": a["datas"][0], "state": a["state"]["0.weight"], "statistics": a["state"]["1.running_mean"],
            **{name: a[name] for name in ("detach", "rows", "column", "columns", "flat", "buffer", "frozen")},
            "crossed": a["crossed"],
            "turned": a["turned"]["t"], "own": a["own"].w, "tied": a["tied"][0], "average": a["average"][0]}
def net2():
    torch.manual_seed(1)
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    m[3].weight = m[2].weight; m[2].bias.requires_grad_(False)
    m[4].weight = nn.Parameter(m[4].weight.detach().t().contiguous().t())  # its memory lies otherwise
    return m
def step():
    F.cross_entropy(model(X), Y).backward(); opt.step(); opt.zero_grad()
def at(t): return t.untyped_storage().data_ptr()
def shares(m, t): return at(t) in map(at, (*m.parameters(), *m.buffers()))
def numbers(held):
    return {(place, n): float(t.double().pow(2).sum()) for place, a in held.items() for n, t in tensors(a).items()}
import os; home = os.path.expanduser("~/states.pt")
def differ(found, wanted, rel=1e-6):
    return {key: (value, wanted[key]) for key, value in found.items() if value != pytest.approx(wanted[key], rel=rel)}
seen = {}
"""
PLAYED = """
model = net2(); opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1); held = {}
held["before"] = aliases(model); kept = held["before"]["detach"]
--- ranks
step(); held["cell"] = aliases(model)
with whole(model): held["whole"] = aliases(model)
--- here
held["between"] = aliases(model); first = numbers(held)
apart = [(place, n) for place, a in held.items() for n, t in tensors(a).items() if shares(model, t) == (n == "average")]
assert not apart, apart
--- ranks
step(); read = numbers(held)
torch.save([a["state"] for a in held.values()], home)
--- here
assert kept is held["before"]["detach"]
saved = [float(s["0.weight"].double().pow(2).sum()) for s in torch.load(home)]
assert not differ(read, numbers(held)) and saved == pytest.approx(len(held) * [read["cell", "detach"]])
--- ranks
with torch.no_grad():
    for place, name in zip(held, ("rows", "state", "columns", "turned")): tensors(held[place])[name].mul_(0.5)
    held["between"]["tied"][0].add_(0.1); held["cell"]["buffer"].add_(1); held["whole"]["frozen"].fill_(0.3)
step(); written = numbers(held)
--- ranks
step(); more = {"held": held}
--- here
assert more["held"] is held
apart = [(place, n) for place, a in held.items() for n, t in tensors(a).items() if shares(model, t) == (n == "average")]
assert not apart, apart
seen[strategy] = [first, read, written, numbers(held)]
for now, then in zip(seen[strategy], seen["single"]): assert not differ(now, then, 1e-3), differ(now, then, 1e-3)
del model, opt, held, more, kept
"""
MIDST = """
model = net2(); held = {"before": aliases(model)}
--- ranks
held["cell"] = aliases(model)
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
step(); read = numbers(held)
--- here
assert not differ(read, numbers(held)), differ(read, numbers(held))
apart = [(place, n) for place, a in held.items() for n, t in tensors(a).items() if shares(model, t) == (n == "average")]
assert not apart, apart
--- ranks
step(); again = numbers(held)
--- here
seen[strategy] = [read, again, numbers(held)]
for now, then in zip(seen[strategy], seen["single"]): assert not differ(now, then, 1e-3), differ(now, then, 1e-3)
del model, opt, held
"""
IN_PIECES = (
    "sharded", "fsdp", "pipeline --microbatches 1", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"
)  # fmt: skip


def _installed(strategy: str) -> None:
    if not all(map(find_spec, registry.strategy(strategy.split()[0].split("_")[0]).needs.packages)):
        pytest.skip(f"{strategy} is not installed")


@pytest.fixture
def of_weights(shared_kernel: Kernel) -> Iterator[Notebook]:
    cells = Notebook(shared_kernel)
    cells(OF_WEIGHTS)
    yield cells
    cells("%distributed stop")


@pytest.mark.parametrize("strategy", ["ddp", *IN_PIECES])
@pytest.mark.parametrize("story", [PLAYED, MIDST], ids=["between cells", "before an optimizer of the cell"])
def test_what_shares_a_weights_memory_goes_on_doing_so(of_weights: Notebook, story: str, strategy: str) -> None:
    """Made in the notebook, in an earlier cell or in `with whole(…)`; read, saved, written, or only carried along."""
    _installed(strategy)
    for typed in ("single", strategy):
        options = typed if typed == "single" else f"{typed} --devices 2"
        of_weights(f"strategy = {typed!r}")
        play(of_weights, story, options=f"-s {options} --monitor off")


REFUSED = {
    "q = nn.Parameter(model[0].weight.data)": ("q.norm()", "a tensor of model.0.weight that was made in the notebook"),
    "r = model[0].weight.detach().requires_grad_()": ("r.sum()", "make it in the cell that uses it"),
    "d = model[0].weight.data.diagonal()": ("d.norm()", "that was made in the notebook"),
    "w = model[0].weight.detach()": ("w.data = torch.zeros(4, 4)", "or bind the name anew (`w = "),
}


@pytest.mark.parametrize("strategy", ["fsdp", "sharded", "deepspeed_stage_3"])
def test_what_cannot_show_a_weight_is_refused_where_it_is_used(of_weights: Notebook, strategy: str) -> None:
    _installed(strategy)
    for made, (used, sentence) in REFUSED.items():
        name = made.partition(" ")[0]
        of_weights("model = net2(); opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)")
        of_weights(made)
        of_weights(f"%%distributed -s {strategy} -d 2 --monitor off\nstep(); held = [{name}]")
        of_weights(f"assert held[0] is {name} and shares(model, {name}), {made!r}")
        error = of_weights.fails(f"%%distributed -s {strategy} -d 2 --monitor off\nstep()\n{used}")
        assert sentence in error.evalue, (made, error.evalue)
        of_weights(f"assert shares(model, {name}) and {name}.shape == held[0].shape, {made!r}")
