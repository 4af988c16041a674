"""`save`, `load` and `resumable`, called in a cell on a rank, or in the notebook as in any program."""

from __future__ import annotations

import pickle
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.base.errors import UsageError
from nbtrain.compat import python
from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints
from nbtrain.worker.setup.whole import refuse

KINDS = ((nn.Module, "model"), (Optimizer, "optimizer"), (LRScheduler, "scheduler"))
_plain: Checkpoints | None = None
"""of the notebook, or of a program"""
_cell: int | None = None
"""the number of the notebook's cell in which that was asked for last"""
_resume: tuple[str, bytes] | None = None
"""the notebook's last load that loops are to go on from, and where they stood"""


def save(path: Any, *objects: Any, full: bool = False, **named: Any) -> None:
    """Write a checkpoint: a folder from which any strategy on any number of ranks goes on.

    `save("best")` in a cell saves all models, optimizers and schedulers that it uses; `save("best", model)` and
    `save("best", model=model, optimizer=optimizer)` save these. With `full=True` the weights are one safetensors file,
    which plain PyTorch loads. In a cell every rank has to call it, and the training goes on while it is written.
    """
    refuse("save()")
    one = current()
    one.work.save(path, _given(one, objects, named, python.caller().f_globals), full)
    if one is not Checkpoints.running:
        one.finish()


def load(path: Any, *objects: Any, missing_ok: bool = False, weights_only: bool = True, **named: Any) -> None:
    """Bring back what `save` wrote, into the objects that are there, in place.

    `path` may also be a folder of `--save-to` (the newest is taken), or a safetensors file.
    Where an optimizer is among what is loaded, random states, step count and `resumable` loops go on, too. If the
    checkpoint is of another model, nothing is changed. With `missing_ok=True` nothing happens where there is none yet,
    so that the first run and those that go on are one text.

    `weights_only` as in `torch.load`: tensors and plain values are read, and objects of other classes are refused, as
    reading those can run code of whoever wrote them.
    """
    global _resume
    refuse("load()")
    one = current()
    if missing_ok and one.work.is_missing(path):
        return
    before = one.positions.pending
    one.work.load(path, _given(one, objects, named, python.caller().f_globals), weights_only)
    pending = one.positions.pending
    if one is not Checkpoints.running and pending is not before:  # with models alone, nothing goes on
        _resume = (uuid.uuid4().hex, pickle.dumps(pending)) if pending else None


def current() -> Checkpoints:
    global _plain, _cell, _resume
    if Checkpoints.running is not None:
        return Checkpoints.running
    if _plain is None:
        _plain = Checkpoints()
    if (cell := _cell_of_the_notebook()) != _cell:  # its loops are counted from the first, as those of a cell on ranks
        _cell = cell
        if _plain.positions.used:
            _resume = None
        _plain.positions.begin()
    return _plain


def _cell_of_the_notebook() -> int | None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return None if shell is None else shell.execution_count


def resume() -> tuple[str, bytes] | None:
    """Where the loops of the next cell are to go on, when the notebook has loaded a checkpoint: for its ranks."""
    if _plain is not None and current().positions.used:  # by a loop of the notebook's own
        return None
    return _resume


def resumed(load: str) -> None:
    """The loops of a cell have gone on from this load, and what they did is in the notebook: once is enough."""
    global _resume
    if _resume is not None and _resume[0] == load:
        _resume = None
        if _plain is not None:
            _plain.positions.go_on(())


def _given(
    one: Checkpoints, objects: Iterable[Any], named: Mapping[str, Any], names: Mapping[str, Any]
) -> dict[str, Any]:
    """The objects by name: the cell's name for each, else the caller's global variable, else its kind."""
    if one is not Checkpoints.running and not objects and not named:
        raise UsageError(
            "in the notebook, say what: nbtrain.save(path, model=model, optimizer=optimizer). In a %%distributed cell "
            "save(path) takes what the cell uses"
        )
    for item in (*objects, *named.values()):
        if not isinstance(item, tuple(kind for kind, _ in KINDS)):
            raise UsageError(
                f"a checkpoint holds models, optimizers and schedulers, not {type(item).__name__}; for anything else "
                "there is torch.save"
            )
    if not objects and not named:
        found: dict[str, Any] = {}
        for name, item in one.in_use().items():
            _add(found, item, name if "#" not in name else _called(item, names) or name)
        return found
    found = dict(named)
    known = {id(item): name for name, item in one.objects.items() if "#" not in name}
    for item in objects:
        kind = next(word for kind, word in KINDS if isinstance(item, kind))
        _add(found, item, known.get(id(item)) or _called(item, names) or kind)
    return found


def _called(item: Any, names: Mapping[str, Any]) -> str | None:
    return next((name for name, value in names.items() if value is item and not name.startswith("_")), None)


def _add(by_name: dict[str, Any], item: Any, name: str) -> None:
    free, number = name, 2
    while free in by_name:
        free, number = f"{name}-{number}", number + 1
    by_name[free] = item


T = TypeVar("T")


class resumable(Generic[T]):
    """`for epoch in resumable(range(10)):` begins, after `load`, with the epoch that was under way, and in there the
    loaders pass over the batches that were seen. A loader by itself can be given, too: `for x, y in resumable(loader)`.

    Without a `load` before it, it is a loop like any other. Write `save` last in the loop's body: what comes after it
    would be left out.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]  # raises what `len` of the user's raises

    def __iter__(self) -> Iterator[T]:
        items: Iterator[Any] = current().positions.loop(self.items)
        return items
