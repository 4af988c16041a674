"""Every way in which a model can be trained as one by several ranks: a strategy of the registry with its options.

Nothing here names them: a strategy that joins the registry is played by `test_parity` and `test_sharded_memory` with no
line changed. Its variants are its defaults, its presets, each choice of a `Literal` option, each switch thrown, and
its presets with small buckets if it has buckets. What cannot be derived is in the tables below.

`make verify` plays a few of them, which SEED draws: `sample`. `make parity` (PARITY=all) plays all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from nbtrain.base.specs import Needs
from nbtrain.machine import registry
from nbtrain.notebook.magics.line.strategy_flags import flags_of
from nbtrain.strategies import presets

EVERYTHING = os.environ.get("PARITY") == "all"
SEED = int(os.environ.get("SEED", "0"))

WITH: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("sharding", "HYBRID_SHARD"): {"replicas": 2},
    ("offload_parameters", "cpu"): {"stage": 3},
}
"""Options that mean something only together with others."""

MORE: Mapping[str, tuple[Mapping[str, Any], ...]] = {"pipeline": ({"microbatches": 3},)}
"""Options whose values are no choices: some that differ from the default in kind."""

NODES: Mapping[str, tuple[int, ...]] = {"ddp2": (2,)}
"""In how many nodes a strategy is played besides, where it is another one then."""

ROUNDS = {("comm_dtype", "bf16"), ("comm_dtype", "fp16"), ("compression", "fp16")}
"""Asked for, they compute in fewer digits: no weights can be the one process's to 1e-5."""

NOT_HERE = {
    ("offload_optimizer", "nvme"): "what is smaller than 1 MiB is never swapped",
    ("offload_parameters", "nvme"): "it needs a precision of two bytes",
    ("cpu_checkpointing", True): "it needs a GPU",
}
"""What cannot be played here on small models in fp32, and why."""

COMPILED = {("offload_optimizer", "cpu")}
"""What compiles something for a minute where it is used for the first time."""


@dataclass(frozen=True, slots=True)
class Variant:
    strategy: str
    given: tuple[tuple[str, Any], ...] = ()
    """the options that are not left at their defaults"""
    nodes: int = 1

    @property
    def line(self) -> str:
        """How a user writes it."""
        nodes = [f"--nodes {self.nodes}"] if self.nodes > 1 else []
        return " ".join([f"-s {self.strategy}", *nodes, *(_flag(name, value) for name, value in self.given)])

    @property
    def options(self) -> Any:
        return registry.strategy(self.strategy).load().Options(**dict(self.given))

    @property
    def compiles(self) -> bool:
        return bool(COMPILED & set(self.given))

    def fits(self, devices: int) -> bool:
        """With as many ranks, or one that has them all."""
        needs = registry.strategy(self.strategy).needs
        ranks = 1 if needs.together else devices
        several = self.nodes == 1 or ranks > self.nodes  # with one rank in each node it is ddp
        return several and needs.min_ranks <= ranks and (needs.max_ranks is None or ranks <= needs.max_ranks)

    def __str__(self) -> str:
        nodes = [("nodes", self.nodes)] if self.nodes > 1 else []
        return "-".join([self.strategy, *(f"{name}={value}" for name, value in (*nodes, *self.given))])


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def exact(devices: int) -> list[Variant]:
    """Those that ought to have the numbers of one process, on so many devices."""
    return [one for one in _all() if one.fits(devices) and not ROUNDS & set(one.given)]


def sample(variants: Iterable[Variant], draw: random.Random, count: int = 1) -> list[Variant]:
    """Of each strategy so many, none of which compiles anything."""
    of: dict[str, list[Variant]] = {}
    for one in variants:
        if not one.compiles:
            of.setdefault(one.strategy, []).append(one)
    return [one for ones in of.values() for one in draw.sample(ones, min(count, len(ones)))]


def buckets(strategy: str, megabytes: float) -> dict[str, Any]:
    """The options that say how large a bucket is: in megabytes, or in numbers of four bytes."""
    sizes = {}
    for flag in flags_of(registry.strategy(strategy).load()).values():
        if "bucket" in flag.field:
            elements = max(2, int(megabytes * 2**18) // 2 * 2)
            sizes[flag.field] = megabytes if flag.field.endswith("_mb") else elements
    return sizes


def _all() -> list[Variant]:
    found: dict[Any, Variant] = {}
    for name, entry in registry.STRATEGIES.items():
        if not playable(entry.needs) or entry.load().facts.hands_off:
            continue
        for given in _given(name):
            if NOT_HERE.keys() & given.items():
                continue
            beside = {name: value for option in given.items() for name, value in WITH.get(option, {}).items()}
            for nodes in (1, *NODES.get(name, ())):
                variant = Variant(name, tuple(sorted({**beside, **given}.items())), nodes)
                found.setdefault(_key(variant), variant)
    return list(found.values())


def playable(needs: Needs) -> bool:
    """On the CPU of this machine, in this environment."""
    return "cpu" in needs.kinds and all(find_spec(package) for package in needs.packages)


def _key(variant: Variant) -> Any:
    """Equal for two that are the same, one of them spelled out."""
    return variant.strategy, variant.nodes, str(variant.options)


def _given(strategy: str) -> Iterator[dict[str, Any]]:
    named = [dict(one.options) for one in presets.PRESETS.values() if one.strategy == strategy]
    yield {}
    yield from named
    yield from map(dict, MORE.get(strategy, ()))
    options = registry.strategy(strategy).load().Options
    switches = {one.name: one.default for one in fields(options) if isinstance(one.default, bool)}
    for flag in {flag.field: flag for flag in flags_of(registry.strategy(strategy).load()).values()}.values():
        yield from ({flag.field: choice} for choice in flag.choices)
        if flag.field in switches:
            yield {flag.field: not switches[flag.field]}
    if sizes := buckets(strategy, 0.0005):
        yield from ({**given, **sizes} for given in ({}, *named))
