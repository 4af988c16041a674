"""What a cell goes on holding of the tensors that a block `with whole(…)` has shown: `sd = model.state_dict()`.

In one process that goes on being the weight. Inside of the block it shares the memory of a complete tensor, which
nobody trains; at its end what shows the weight outside takes its place, wherever the cell holds it. Where that cannot
be, as in a variable of a function, it refuses to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.compat.tensors import as_plain_tensors, become, memory_id, shown_by, version
from nbtrain.strategies.kit.memory_left_behind import memory_of
from nbtrain.strategies.kit.owned_tensors import StandIn
from nbtrain.worker.setup.shown_tensors import Shown, ShownGradient, tensors_in

TAKEN = (
    "a tensor of {name} that was taken out of `with whole(…)`, and that in one process goes on being the weight's own: "
    "read it from the model again below the block, or take a copy inside (`w.clone()`, `copy.deepcopy(state)`)"
)
GRADIENT = (
    "{name} was taken out of `with whole(…, gradients=True)` and written to below, where it is p.grad in one process "
    "only: write to it inside of the block, or take a copy there (`p.grad.clone()`)"
)
NAME = "nbtrain_taken"
"""the attribute that has the name"""


class Gone(StandIn):
    """What nothing can take the place of: it says where it is from."""

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        gone = next((one for one in tensors_in([args, kwargs]) if isinstance(one, Gone)), None)
        raise NotSupported(TAKEN.format(name=vars(gone).get(NAME, "the model")))


class Taken(NamedTuple):
    tensor: torch.Tensor
    of: list[torch.Tensor]
    """what it shows; a list, so that what takes the place of that is found here, too"""
    name: str
    form: tuple[Any, ...] | None
    """size, strides and offset of a part; None: it shows all of it"""


class TakenGradient:
    """A gradient that a block has shown, which somebody may hold."""

    def __init__(self, shown: ShownGradient) -> None:
        self.of, self.stood, self.name = shown.tensor, shown.before, shown.name
        gradient = shown.now.grad
        self.held = None if gradient is None else ref(gradient)
        self.version = 0 if gradient is None else version(gradient)

    def check(self) -> None:
        """Raise if it was written to, and is the parameter's still in one process."""
        gradient = None if self.held is None else self.held()
        if gradient is not None and version(gradient) != self.version and self.of.grad is self.stood:
            raise NotSupported(GRADIENT.format(name=self.name))


class TakenTensors:
    """Of the blocks that are open; told of what functions of torch return there."""

    def __init__(self) -> None:
        self._memories: dict[int, tuple[Any, Shown]] = {}
        """by id of what is shown: the memory, held so that its id is used once, and whose it is"""
        self._noted: dict[int, tuple[ref[torch.Tensor], Shown]] = {}

    def watch(self, shown: Sequence[Shown]) -> None:
        """`shown`: those that are complete for as long as the block only."""
        for one in shown:
            self._keep(one)

    def _keep(self, one: Shown) -> None:
        if (memory := memory_of(one.now)) is not None:
            self._memories[memory_id(memory)] = memory, one

    def note(self, result: Any) -> None:
        for tensor in tensors_in(result):
            memory = memory_of(tensor)
            held = None if memory is None else self._memories.get(memory_id(memory))
            if held is not None and tensor is not held[1].now:
                self._noted[id(tensor)] = ref(tensor), held[1]

    def given(self, one: Shown, value: torch.Tensor) -> None:
        """It was given this memory: `p.data = value`."""
        self._keep(one)
        self.note([value, shown_by(value)])

    def of(self, shown: Sequence[Shown]) -> list[Taken]:
        """Those that are held still, and show what these are now."""
        found = []
        for reference, one in self._noted.values():
            tensor = reference()
            if tensor is not None and any(one is other for other in shown) and _alike(tensor, one.now):
                form = tensor.size(), tensor.stride(), tensor.storage_offset() - one.now.storage_offset()
                whole = (one.now.size(), one.now.stride(), 0)
                found.append(Taken(tensor, [one.tensor], one.name, None if form == whole else form))
        return found

    def forget(self) -> None:
        self._memories, self._noted = {}, {}


def _alike(tensor: torch.Tensor, now: torch.Tensor) -> bool:
    one, other = memory_of(tensor), memory_of(now)
    return one is not None and other is not None and memory_id(one) == memory_id(other)


@torch.no_grad()
def hand_over(taken: list[Taken], alike: bool, replaced: Callable[[Any], None]) -> None:
    """Outside of the block again. `alike`: every rank holds as many. Collective if so; empties the list."""
    names = [(ref(one.tensor), one.name) for one in taken]
    pairs = [*_pairs(taken)] if alike else []
    taken.clear()
    if pairs:
        replaced(pairs)
        pairs.clear()
    for reference, name in names:
        if (held := reference()) is not None:
            give_up(held, name)


def give_up(tensor: torch.Tensor, name: str) -> None:
    become([tensor], Gone)
    vars(tensor)[NAME] = name


def _pairs(taken: Sequence[Taken]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for one in taken:
        with as_plain_tensors():
            follows = one.tensor.dtype == one.of[0].dtype and not one.tensor.requires_grad
        with suppress(NotSupported):
            if follows:
                shows = one.of[0].detach()
                yield one.tensor, shows if one.form is None else shows.as_strided(*one.form)
