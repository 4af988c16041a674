"""Names → classes, loaded on use. What a name needs is known without importing what it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from nbtrain.errors import UsageError
from nbtrain.specs import Needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One strategy or engine: where it is, what it needs, what it is for."""

    name: str
    where: str
    """`module:Class`"""
    summary: str
    shards: str = "nothing"
    in_pieces: bool = False
    """no rank has all of a model: after a failure, its last step can be brought home if all ranks stand at the same"""
    needs: Needs = Needs()

    def load(self) -> Any:
        module, _, name = self.where.partition(":")
        return getattr(import_module(module), name)


def _table(*entries: Entry) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


STRATEGIES: Mapping[str, Entry] = _table(
    Entry(
        name="none",
        where="nbtrain.strategies.none:NoStrategy",
        summary="ranks and a process group, nothing touched",
    ),
    Entry(
        name="single",
        where="nbtrain.strategies.single:Single",
        summary="one process, one device",
        needs=Needs(max_ranks=1),
    ),
    Entry(
        name="ddp",
        where="nbtrain.strategies.ddp:DDP",
        summary="every rank holds the model and a share of the batches; gradients are averaged",
        shards="batches",
    ),
    Entry(
        name="fsdp",
        where="nbtrain.strategies.fsdp:FSDP",
        summary="every rank holds a part of all there is; a layer is gathered while it computes",
        shards="batches, optimizer, gradients, parameters",
        in_pieces=True,
    ),
    Entry(
        name="deepspeed",
        where="nbtrain.strategies.deepspeed:DeepSpeed",
        summary="ZeRO: ranks share out the optimizer's state, gradients (stage 2) and parameters (stage 3)",
        shards="batches, optimizer, gradients, parameters",
        in_pieces=True,
        needs=Needs(min_ranks=2, packages=("deepspeed",)),
    ),
)

ENGINES: Mapping[str, Entry] = _table(
    Entry(name="local", where="nbtrain.engines.local:LocalPool", summary="warm processes on this machine"),
    Entry(
        name="inprocess",
        where="nbtrain.engines.inprocess:InProcess",
        summary="one rank inside the kernel; breakpoints work",
        needs=Needs(max_ranks=1),
    ),
)

_announced: dict[str, Entry] = {}
"""by other packages, as far as they were read"""


def strategies() -> dict[str, Entry]:
    """The built-in strategies and those that other packages announce (entry point group `nbtrain.strategies`)."""
    for point in entry_points(group="nbtrain.strategies"):
        if point.name not in STRATEGIES:
            summary = f"from {point.value.split(':')[0]}"
            _announced[point.name] = Entry(name=point.name, where=point.value, summary=summary)
    return {**STRATEGIES, **_announced}


def find_strategy(name: str) -> Entry | None:
    """The strategy of this name, or None. What other packages announce is read only when nobody here has the name:
    that takes milliseconds, and every cell asks."""
    return STRATEGIES.get(name) or _announced.get(name) or strategies().get(name)


def load_strategy(name: str, namespace: Mapping[str, Any]) -> Any:
    """What has this name: a class of the registry's, or a class or object of the notebook's."""
    entry = find_strategy(name)
    return entry.load() if entry is not None else namespace[name]


def make_strategy(name: str, options: Mapping[str, Any], namespace: Mapping[str, Any]) -> Any:
    """The strategy itself, with these options. An object of the notebook's is used as it is, unless they are others
    than its own."""
    found = load_strategy(name, namespace)
    make: Any = found if isinstance(found, type) else type(found)
    wanted = make.Options(**options)
    return found if found is not make and found.options == wanted else make(wanted)


def strategy(name: str) -> Entry:
    return find_strategy(name) or _lookup("strategy", name, strategies())


def engine(name: str) -> Entry:
    return _lookup("engine", name, ENGINES)


def _lookup(what: str, name: str, known: Mapping[str, Entry]) -> Entry:
    try:
        return known[name]
    except KeyError:
        raise UsageError(f"unknown {what} {name!r}; there are: {', '.join(sorted(known))}") from None
