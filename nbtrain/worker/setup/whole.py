"""`with whole(model.head, optimizer):` in a cell: ordinary, complete tensors of what the ranks keep in pieces.

Inside, what is named is on every rank as the notebook knows it, whatever the strategy: the components are paused, each
tensor in pieces is put together, and at the end every rank takes its part of what has become of it. The ranks compare
their results first, so that no rank's own numbers get into a piece. What changes in form (a layer that is frozen, a new
head, another optimizer) is set up anew afterwards.

What was not named is still in pieces: whatever reads it inside raises, so that naming a part bounds memory and nothing
is computed with a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.base.specs import RunSpec
from nbtrain.compat.intercept import Listeners
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.setup.components import Components

if TYPE_CHECKING:
    from nbtrain.worker.setup.shown_tensors import Shown
    from nbtrain.worker.setup.taken_tensors import TakenGradient
    from nbtrain.worker.setup.whole_blocks import Blocks

INSIDE = (
    "{what} inside of `with whole(…)`, where weights and states are shown as they are in one process, and the ranks "
    "do not work together: write it below the block"
)


@dataclass(slots=True, eq=False)
class Whole:
    """What `whole(…)` returns."""

    objects: list[Any]
    gradients: bool
    opened: list[Callable[[bool], None] | None] = field(default_factory=list)
    """what ends each block that was begun with it; None: there is nothing to do"""

    def __enter__(self) -> Any:
        self.opened.append(None if _installed is None else _installed.enter(self.objects, self.gradients))
        return self.objects[0] if len(self.objects) == 1 else tuple(self.objects)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (leave := self.opened.pop()) is not None:
            # Where a cell is stopped, nobody knows where the other ranks are.
            leave(kind is None or issubclass(kind, (Exception, GeneratorExit)))


def whole(*objects: Any, gradients: bool = False) -> Whole:
    """`with whole(model.head):` in a cell: inside, what is named is complete on every rank, under any strategy.

        with whole(model.head), torch.no_grad():
            model.head.weight.clamp_(-1, 1)

    Modules, parameters and optimizers can be named; an optimizer's are the tensors of its state. Nothing named: all
    models and optimizers of the cell. What is changed inside is what all ranks have afterwards. With `gradients=True`,
    between `loss.backward()` and `optimizer.step()`, `p.grad` of what is named is complete, too. All ranks have to come
    here, with the same objects.

    Random numbers of torch that are drawn inside are those of one process, on every rank. Where every rank has
    everything anyhow (`ddp`) that is all; under `single`, and outside of a distributed cell, there is nothing to do.
    """
    return Whole(_listed(objects), gradients)


def _listed(objects: Iterable[Any]) -> list[Any]:
    """Modules, tensors and optimizers; lists, dicts and iterators of them are opened, as `named_parameters()` is."""
    flat: list[Any] = []
    for item in objects:
        if isinstance(item, nn.Module | torch.Tensor | Optimizer):
            flat.append(item)
        elif isinstance(item, dict):
            flat += _listed(item.values())
        elif isinstance(item, list | tuple | set | Iterator | ValuesView | ItemsView):
            flat += _listed(part for part in item if not isinstance(part, str))
        else:
            raise UsageError(
                f"whole() takes modules, parameters and optimizers, not {type(item).__name__}: with whole(model), or "
                "with whole() for all that the cell uses"
            )
    return flat


def refuse(what: str) -> None:
    """Raise inside of a block."""
    if open_blocks:
        raise NotSupported(INSIDE.format(what=what))
    if taken_gradients:
        _check_taken()


def _check_taken() -> None:
    taken = taken_gradients[:]
    taken_gradients.clear()
    for gradient in taken:
        gradient.check()


open_blocks: list[list[Shown]] = []
"""what is shown that ranks keep in pieces, by blocks, the innermost last"""
taken_gradients: list[TakenGradient] = []
"""what the cell still holds of those that the last block has shown"""
_installed: WholeTensors | None = None
"""of the runtime whose listeners are in place in this process"""


def put_off(models: list[nn.Module], optimizer: Optimizer) -> bool:
    """Whether this optimizer was made inside of a block, and is set up at its end."""
    if open_blocks and _installed is not None:
        _installed.later.append((models, optimizer))
    return bool(open_blocks)


def _install(tensors: WholeTensors | None) -> None:
    global _installed
    _installed = tensors


class WholeTensors(Part):
    """The blocks of a rank's cells; what they do is in whole_blocks.py, and loaded with the first one."""

    def __init__(
        self,
        components: Components,
        settle: Callable[[], None],
        within: Callable[[], int],
        set_up: Callable[[list[nn.Module], Optimizer], None],
        one_process: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`settle`: called before gradients are shown; `within`: BACKWARD, STEP or 0, what the rank is in the middle
        of; `set_up`: called with the models and the optimizer that a block has made, at its end; `one_process`: draws
        in there are those of one."""
        self._made_of = components, settle, within, set_up, one_process
        self._blocks: Blocks | None = None
        self.cell: RunSpec | None = None
        """that runs"""
        self.later: list[tuple[list[nn.Module], Optimizer]] = []
        """models and optimizers that a block has made"""

    def listen(self, listeners: Listeners) -> None:
        _install(self)
        listeners.at_end(lambda: _install(None))

    def begin(self, cell: Cell) -> None:
        self.cell = cell.run

    def end(self, ok: bool) -> None:
        """The cell is over: a generator may have a block open still."""
        if self._blocks is not None:
            self._blocks.end(ok)
            taken_gradients.clear()
        self.cell = None

    def enter(self, objects: list[Any], gradients: bool) -> Callable[[bool], None] | None:
        """Returns what ends the block, where several ranks train what is named."""
        if self.cell is None:
            return None
        if self._blocks is None:
            from nbtrain.worker.setup.whole_blocks import Blocks

            self._blocks = Blocks(*self._made_of, open_blocks, self.later, taken_gradients)
        if taken_gradients:
            _check_taken()
        return self._blocks.enter(self.cell, objects, gradients)
