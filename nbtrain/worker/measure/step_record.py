"""What the steps of a trial saw and made, written down so that two trials can be compared: one under a strategy, one as
a single process on the same samples.

Each rank writes the keys of its samples, its losses, and the numbers that the cell's names hold; rank 0 the weights, as
whole tensors, as `state_dict` gives them in a cell under every strategy.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

import nbtrain.compat.intercept as intercept
from nbtrain.base.specs import Record
from nbtrain.strategies.kit.stage_tensors import with_full_stage_tensors
from nbtrain.worker.batches import contents, joined, turned

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
BEFORE, AFTER = "before.pt", "after.pt"


class StepRecord:
    """Records the steps of one trial on one rank."""

    def __init__(self, record: Record, rank: int, models: Callable[[], Mapping[str, Any]]) -> None:
        """`models`: what the cell uses, by name."""
        self.asked = record
        self.share = 0
        """which part of the samples this rank sees; ranks of one share see the same"""
        self._folder = Path(record.folder)
        self._rank = rank
        self._models = models
        self._losses: list[float] = []
        self._samples: list[tuple[int, int, list[Any]]] = []
        """number of the loader, epoch, keys: for each batch"""
        self._loaders: list[Any] = []
        self._epochs: dict[int, int] = {}
        self._latest: dict[int, list[list[Any]]] = {}
        """by the number of a loader: what its last sampler has given so far"""

    def begin(self) -> None:
        """The cell's objects are set up."""
        for name in self.asked.without:
            for model in self._modules().values():
                SWITCHES[name](model)
        if self.asked.stands_for:
            self._write_weights(BEFORE)

    def keeps_order(self) -> bool:
        """Whether loaders draw their order apart from other draws. Ranks with samples of their own do, and so do
        models that drop under the other strategies; in one process dropout moves the order of the next epoch."""
        return self.asked.stands_for > 1 or any(map(rates, self._submodules()))

    # -- what the rank tells it --------------------------------------------------------------------

    def loss(self, tensors: Any) -> None:
        """A backward begins from these."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if all(isinstance(root, torch.Tensor) and root.numel() == 1 for root in roots):
            self._losses.append(sum(float(root.detach()) for root in roots))

    def drawing(self, loader: Any, batches: Any) -> Any:
        """Return a loader's batch sampler, whose batches are noted."""
        return _NotingSampler(batches, self._latest, self._number(loader), self.asked.turned)

    def opened(self, iterator: Any, loader: Any, dealt: bool, every_batch: bool) -> None:
        """A pass through a loader begins. `dealt`: nbtrain says which batches this rank gets; `whole`: all of them, as
        every rank does where a loop evaluates."""
        number = self._number(loader)
        self._epochs[number] = self._epochs.get(number, -1) + 1
        drawn = self._latest.get(number, [])
        trains = not every_batch and (dealt or torch.is_grad_enabled())
        counts = trains or (every_batch and self.share == 0)
        iterator.nbtrain_record = _Pass(loader, number, self._epochs[number], drawn, trains and not dealt, counts)

    def next_batch(self, take: Callable[[Any], Any], iterator: Any) -> Any:
        """`take(iterator)`; for one process, as many batches as the ranks would get of a loader that nbtrain does not
        share out."""
        first = take(iterator)
        going: _Pass | None = getattr(iterator, "nbtrain_record", None)
        if going is None:
            return first
        parts = [first]
        if self.asked.stands_for > 1 and going.joins:
            with suppress(StopIteration):
                while len(parts) < self.asked.stands_for:
                    parts.append(take(iterator))
            first = turned(joined(parts)) if self.asked.turned else joined(parts)
        if not going.counts:
            return first
        # Of data that is iterated nobody knows an index: a sample is known by its content.
        if isinstance(going.loader.dataset, IterableDataset):
            keys: list[Any] = contents(first)
        else:
            keys = [key for batch in going.drawn[going.taken : going.taken + len(parts)] for key in batch]
        going.taken += len(parts)
        self._samples.append((going.number, going.epoch, keys))
        return first

    # -- when the steps are over --------------------------------------------------------------------

    def write(self, namespace: Mapping[str, Any], drew: bool, said: Iterable[str] = ()) -> None:
        """Write the record. Collective. `drew`: whether this rank has drawn random numbers of its own; `said`: what
        differs from one process beyond the steps of the trial."""
        self._write_weights(AFTER)
        numbers = {
            name: number for name in self.asked.numbers if (number := as_number(namespace.get(name))) is not None
        }
        modules = self._submodules()
        record = {
            "losses": self._losses,
            "samples": self._samples,
            "numbers": numbers,
            "share": self.share,
            "drew": drew,
            "said": list(said),
            "dropout": any(drops(module) for module in modules),
            "batch norm": any(isinstance(m, BATCH_NORMS) and m.training for m in modules),
        }
        (self._folder / f"rank{self._rank}.json").write_text(json.dumps(record, default=str))

    def _modules(self) -> dict[str, nn.Module]:
        return {name: item for name, item in self._models().items() if isinstance(item, nn.Module)}

    def _submodules(self) -> list[nn.Module]:
        return [module for model in self._modules().values() for module in model.modules()]

    def _write_weights(self, file: str) -> None:
        from torch.distributed.tensor import DTensor  # see rank_imports.py

        held = {
            f"{name}.{key}": value
            for name, model in self._modules().items()
            for key, value in model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        full = with_full_stage_tensors(held)  # collective, as is what follows
        tensors = {key: value.detach() for key, value in full.items()}
        plain = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in tensors.items()}
        if self._rank == 0:
            save = intercept.original("torch.save")  # the cell's own is switched off while it is tried
            save(plain, self._folder / file)

    def _number(self, loader: Any) -> int:
        """The loader's number: loaders are first used in the same order in every trial."""
        for number, known in enumerate(self._loaders):
            if known is loader:
                return number
        self._loaders.append(loader)
        return len(self._loaders) - 1


@dataclass(slots=True)
class _Pass:
    """One pass through a loader."""

    loader: Any
    number: int
    epoch: int
    drawn: list[list[Any]]
    """what its sampler has given so far: workers run ahead"""
    joins: bool
    """nobody deals it out: one process takes what each of the ranks would take"""
    counts: bool
    """its samples are noted"""
    taken: int = 0
    """so many of these have become batches"""


class _NotingSampler:
    """A batch sampler that notes what it gives."""

    def __init__(self, batches: Any, latest: dict[int, list[list[Any]]], number: int, turned: bool) -> None:
        self._batches = batches
        self._latest = latest
        self._number = number
        self._turned = turned

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        given: list[list[Any]] = []
        self._latest[self._number] = given
        return self._noted(iter(self._batches), given)

    def _noted(self, batches: Iterator[Any], noted: list[list[Any]]) -> Iterator[Any]:
        for batch in batches:
            single = not isinstance(batch, (list, tuple))
            given = [batch] if single else list(reversed(batch)) if self._turned else list(batch)
            noted.append([key if isinstance(key, (int, str)) else str(key) for key in given])
            yield batch if single else given


def as_number(value: Any) -> float | None:
    """The value as a number that can be compared with another process's; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "size", 0) == 1:  # numpy's
        return as_number(value.item())
    return None


# -- switches ---------------------------------------------------------------------------------------


def rates(module: nn.Module) -> list[str]:
    """The attributes that say how much of it drops: `p` of torch's own, `dropout`, `attn_drop` and so on of others."""
    of_torch = ["p"] if "Dropout" in type(module).__name__ else []
    attributes = vars(module)
    return [
        name
        for name in (*of_torch, *(name for name in attributes if "drop" in name.lower()))
        if isinstance(attributes.get(name), float) and attributes[name] > 0
    ]


def drops(module: nn.Module) -> bool:
    return module.training and bool(rates(module))


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for name in rates(module):
            setattr(module, name, 0.0)


def without_batch_norm(model: nn.Module) -> None:
    """Have batch norms use their running statistics, and leave those as they are."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.eval()
            module.train = types.MethodType(_stay, module)  # type: ignore[method-assign]  # of this object alone


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


SWITCHES: Mapping[str, Callable[[nn.Module], None]] = {
    "dropout": without_dropout,
    "batch norm": without_batch_norm,
}
