"""`gather(values, of=loader)`: the results of an evaluation from all ranks, in the order of the data set.

While a loader is iterated to evaluate, the indices that it draws are noted. A sample of a batch that was filled up, or
that several ranks have seen, is in the result once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from numbers import Integral
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from nbtrain.base.errors import UsageError
from nbtrain.worker.batches import joined
from nbtrain.worker.data.batch_dealing import following
from nbtrain.worker.ranks import collectives

UNKNOWN = (
    "gather(values, of=loader): which samples the loader has given is not known. It works for a DataLoader with a data "
    "set that has indices, iterated in this cell under torch.no_grad(), or with the model in eval mode"
)


class DrawnIndices:
    """The indices that each loader has drawn in its last evaluation, on one rank."""

    def __init__(self) -> None:
        self.drawn: WeakKeyDictionary[Any, _IndexNotingSampler] = WeakKeyDictionary()

    def begin(self) -> None:
        self.drawn.clear()

    def noting(self, loader: DataLoader[Any], batches: Any) -> Any:
        """Return a batch sampler that notes its indices."""
        self.drawn[loader] = noted = _IndexNotingSampler(batches)
        return noted

    def indices(self, loader: Any) -> array[int] | None:
        """Those that it has drawn on this rank; None where they are not known."""
        noted = self.drawn.get(loader)
        in_order = getattr(loader, "in_order", True)  # else batches come as workers are done with them
        return noted.drawn if noted is not None and noted.known and in_order else None

    def gather(self, values: Any, loader: Any) -> Any:
        """The values of all samples: a tensor, or a list if `values` is one, or a dict or tuple of such. A list may be
        that of a loop's outputs, one for each batch. Collective."""
        noted = self.drawn.get(loader)
        if (
            isinstance(values, list) and noted is not None and len(values) < len(noted.drawn)
            and isinstance(next(iter(values), None), torch.Tensor | Mapping | list | tuple)
        ):  # fmt: skip
            with suppress(TypeError, RuntimeError, KeyError):  # what cannot be joined is told of as it is
                values = joined(values)
        if isinstance(values, Mapping):
            return {name: self.gather(part, loader) for name, part in values.items()}
        if isinstance(values, tuple):
            parts = [self.gather(part, loader) for part in values]
            return type(values)(*parts) if hasattr(values, "_fields") else tuple(parts)
        rows = values.detach().cpu() if isinstance(values, torch.Tensor) else list(values)
        mine = None if noted is None or not noted.known else (len(values), noted.drawn.tolist(), rows)
        parts = collectives.gather(mine)
        for rank, part in enumerate(parts):
            if part is None:
                raise UsageError(UNKNOWN)
            if part[0] != len(part[1]):
                raise UsageError(
                    f"gather(values, of=loader): rank {rank} has values of {part[0]} samples, and the loader gave it "
                    f"{len(part[1])}. Bring together one value for each sample: torch.cat of a loop's outputs, from "
                    "the loader's first batch to its last"
                )
        place: dict[int, Any] = {}
        for _, indices, values_there in parts:
            for index, row in zip(indices, values_there, strict=True):
                place.setdefault(index, row)
        found = [row for _, row in sorted(place.items(), key=itemgetter(0))]
        if not isinstance(values, torch.Tensor):
            return found
        return torch.stack(found).to(values.device) if found else values[:0]


class _IndexNotingSampler:
    """A batch sampler that notes the indices it gives."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.drawn = array("q")
        self.known = True

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self.batches)  # now: a sampler may draw here
        return self._each(inner)

    def _each(self, inner: Iterator[Any]) -> Iterator[Any]:
        del self.drawn[:]
        for batch in following(inner):
            single = isinstance(batch, Integral)  # with batch_size=None
            try:
                self.drawn.extend([batch] if single else batch)
            except TypeError:  # a sampler of keys
                self.known = False
            yield batch
