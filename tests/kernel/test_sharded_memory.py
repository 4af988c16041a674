"""What a rank holds is what the strategy promises, and no more of it is ever gathered than one rank has to send home.

Counted are storages, of every tensor that is alive on the rank: no strategy is asked what it believes it holds. The
kinds are told apart by when they are there: parameters before the first backward, gradients too after it, parameters
and the optimizer's state when gradients have gone again.

The way home is watched by the kernel's own high-water mark: a rank sets its VmHWM back in the last line of a cell
(/proc/self/clear_refs) and reads it in the first line of the next one. In between it does nothing but compare, gather
and send. What the parcel takes is a memory file, which is counted beside it.

`make verify` plays each strategy that divides more than batches once, in a variant that divides all it can, on 2 or on
4 devices; and one of those that divide nothing. SEED draws. `make parity` plays all variants on both (PARITY=all).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nbtrain.machine import registry
from tests.lines.playing import Ranks, kernel_of
from tests.support.variants import EVERYTHING, SEED, Variant, buckets, exact, sample

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.kernel,
    pytest.mark.limit(240),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the high-water mark is read from /proc"),
]

KINDS = ("parameters", "gradients", "optimizer")
CLOSE = 0.03
MB = 1_000_000
HEAP = 24 * MB
"""What of a rank's 400 MB may come and go beside: messages, lines of output, and blocks of a megabyte that the C
library keeps for later."""

START = """
import ctypes, gc, os, torch, torch.nn as nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(320, 320) for _ in range(8))
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(32))
        self.head = nn.Linear(320, 10)
    def forward(self, x):
        for block in self.blocks:
            x = block(x) / 4
        return self.head(x)

def alive():
    "Bytes of all storages that some tensor here shows."
    import warnings
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        tensors += [t._local_tensor for t in tensors if hasattr(t, "_local_tensor")]
    found = {}
    for t in tensors:
        if t.layout is torch.strided and t.device.type != "meta" and not hasattr(t, "_local_tensor"):
            s = t.untyped_storage()
            if s.nbytes():
                found[s.data_ptr()] = s.nbytes()
    return sum(found.values())

def of_all(value):
    "Of every rank: `gather` gives one value for those that see the same batch."
    import torch.distributed as dist
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

def status():
    with open("/proc/self/status") as lines:
        return {k: int(v.split()[0]) * 1024 for k, v in (line.split(":") for line in lines) if k.startswith("Vm")}

def low_water():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    return status()["VmRSS"]
"""

ANEW = """
torch.manual_seed(0)
model = Deep()
opt = torch.optim.AdamW(model.parameters(), 1e-3)
X = torch.randn(8, 320)
told = {}
"""

TRAIN = """
told["parameters"] = alive()
model(X).square().mean().backward()
told["gradients"] = alive()
opt.step()
told["optimizer"] = alive()
opt.zero_grad()
told["after"] = alive()
told = of_all(told)
before = of_all(low_water())
"""

READ = """
peak = of_all(status()["VmHWM"])
"""
WHOLE = {
    ("stage", 1): {"parameters", "gradients"},
    ("stage", 2): {"parameters"},
    ("sharding", "NO_SHARD"): set(KINDS),
}
"""What an option leaves whole on every rank, of what its strategy divides."""

COPIES = {"deepspeed": 1}
"""The optimizer steps a copy of the parameters, which is divided as its state is; so many."""

RESERVED = {("deepspeed", 3)}
"""Gradients have their place from the beginning, and keep it."""


def divided(variant: Variant) -> set[str]:
    """Which kinds: what the registry says of the strategy, less what an option leaves whole."""
    found = set(KINDS) & set(registry.strategy(variant.strategy).shards.replace(",", " ").split())
    for (name, value), whole in WHOLE.items():
        if getattr(variant.options, name, None) == value:
            found -= whole
    return found


def promised(variant: Variant, ranks: int, size: int) -> dict[str, float]:
    """Bytes of each kind on a rank, for `size` bytes of parameters."""
    options = variant.options
    apart = divided(variant)
    among = ranks // (getattr(options, "replicas", 0) or 1)
    share = {kind: size / (among if kind in apart else 1) for kind in KINDS}
    share["parameters"] += COPIES.get(variant.strategy, 0) * share["optimizer"]
    share["optimizer"] *= 2  # Adam's
    return share


def variants(ranks: int) -> list[Variant]:
    """Those that differ in what they divide; buckets of a megabyte, where there are some."""
    found = {}
    for one in exact(ranks):
        given = {name: value for name, value in one.given if "bucket" not in name}
        sized = Variant(one.strategy, tuple(sorted({**given, **buckets(one.strategy, 1)}.items())))
        if EVERYTHING or (set(given) <= {"stage", "sharding", "replicas"} and not one.compiles):
            found.setdefault(str(sized), sized)
    return list(found.values())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with kernel_of(START) as found:
        found.notebook("model = Deep(); size = sum(p.numel() * 4 for p in model.parameters()); layer = 320 * 320 * 4")
        yield found


def value(ranks: Ranks, expression: str) -> Any:
    return json.loads(ranks.notebook(f"import json; print(json.dumps({expression}))").stdout)


def played() -> list[tuple[int, Variant]]:
    """In the order in which pools are had."""
    if EVERYTHING:
        return [(world, one) for world in (2, 4) for one in variants(world)]
    draw = random.Random(SEED)
    most: dict[str, set[str]] = {}
    for one in variants(4):
        most[one.strategy] = most.get(one.strategy, set()) | divided(one)
    found = [(2, draw.choice([one for one in variants(2) if not most[one.strategy]]))]
    for name in [name for name, kinds in most.items() if kinds]:
        world = draw.choice((2, 4))
        fitting = [one for one in variants(world) if one.strategy == name and divided(one) == most[name]]
        found += [(world, one) for one in sample(fitting, draw)]
    return sorted(found, key=lambda one: one[0])


@pytest.mark.sample("4-sharded")
@pytest.mark.parametrize(("world", "variant"), played(), ids=str)
def test_a_rank_holds_what_is_promised(ranks: Ranks, world: int, variant: Variant) -> None:
    ranks.notebook(ANEW)
    line = f"%%distributed {variant.line} --devices {world}\n"
    run = ranks.cell(line + TRAIN, 120)
    assert run.error is None, run.text[-3000:]
    run = ranks.cell(line + READ, 60)
    assert run.error is None, run.text[-3000:]
    size, layer = value(ranks, "size"), value(ranks, "layer")
    assert size >= 100 * MB
    told, before, peak = value(ranks, "told"), value(ranks, "before"), value(ranks, "peak")
    wanted = promised(variant, world, size)
    held, state = wanted["parameters"], wanted["optimizer"]
    reserved = wanted["gradients"] if (variant.strategy, getattr(variant.options, "stage", None)) in RESERVED else 0
    moments = {
        "parameters": held + reserved,
        "gradients": held + wanted["gradients"],
        "after": held + state + reserved,
    }
    for rank in told:
        shown = {moment: round(rank[moment] / bytes, 4) for moment, bytes in moments.items()}
        assert all(abs(share - 1) <= CLOSE for share in shown.values()), f"of what is promised: {shown}"
        assert rank["optimizer"] <= (held + wanted["gradients"] + state) * (1 + CLOSE)
    grown = [most - had for most, had in zip(peak, before, strict=True)]
    parcel = 3 * size  # the weights and two states come home, in a memory file
    home = grown[0] + parcel
    assert home <= parcel + layer + HEAP, f"{home / MB:.0f} MB, and {parcel / MB:.0f} MB come home"
    assert max(grown[1:], default=0) <= layer + HEAP, grown
