"""What a strategy is: how many ranks train one model as if they were one process.

A strategy knows nothing of engines, notebooks or views. Two small classes: a `Strategy` (one per
pool) sets components up; a `Prepared` (one per component) lives as long as the component does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_lazy(tensor: torch.Tensor) -> bool:
    """Of a `LazyLinear` that has not seen a batch."""
    return hasattr(tensor, "materialize")


@dataclass(slots=True)
class Component:
    """What hangs together among modules, optimizers and schedulers. Changed in place by `set_up`."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    loose: dict[str, torch.Tensor] = field(default_factory=dict)
    """parameters that an optimizer holds and no module owns"""

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter once, in an order that is the same on every rank. Lazy ones have nothing to train yet."""
        found: list[torch.Tensor] = [p for module in self.modules.values() for p in module.parameters()]
        found += self.loose.values()
        return list({id(p): p for p in found if not is_lazy(p)}.values())

    def buffers(self) -> list[torch.Tensor]:
        found = [b for module in self.modules.values() for b in module.buffers()]
        return list({id(b): b for b in found if not is_lazy(b)}.values())


class Prepared:
    """One component under one strategy. Each member runs on a rank."""

    def __init__(self, component: Component) -> None:
        self.component = component

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Called by the patched `clip_grad_norm_`. None: torch's own is right."""
        return None

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside are not communicated; `--accumulate` uses it for all but the last."""
        return nullcontext()

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """When a cell ends: what should be equal on every rank, by name; compared by checksum."""
        return ()

    def reset(self) -> None:
        """A backward may have been cut short by an exception: forget what was under way."""

    def close(self) -> None:
        """Before the component is dropped or set up differently: hooks removed."""


class Strategy:
    """Made once per pool and run options, on every rank, from the options the user gave."""

    hands_off: ClassVar[bool] = False
    """True: models, optimizers and loaders are left as they are, and nothing is guarded"""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        """The strategy's flags, one field each."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        """(index, count) of the batches this rank sees, for every loader."""
        return rank, world_size

    def set_up(self, component: Component) -> Prepared:
        """Collective, before the cell runs. Objects keep their identity. The component is on the rank's
        device already, with the same numbers on every rank."""
        return Prepared(component)
