"""What a cell goes on holding of the tensors that a block `with whole(…)` has shown: `sd = model.state_dict()`.

In one process that goes on being the weight. Inside of the block it shares the memory of a complete tensor, which
nobody trains; at its end what shows the weight outside takes its place, wherever the cell holds it. Where that cannot
be, as in a variable of a function, it refuses to be used.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nbtrain.base.errors import NotSupported
from nbtrain.base.when_imported import if_imported
from nbtrain.compat.dtensor import is_divided, local
from nbtrain.compat.tensors import as_plain_tensors, become, memory_id, shown_by, version
from nbtrain.strategies.kit.memory_left_behind import memory_of
from nbtrain.strategies.kit.owned_tensors import StandIn
from nbtrain.worker.setup.shown_tensors import Shown, ShownGradient, tensors_in

TAKEN = (
    "a tensor of {name} that was taken out of `with whole(…)`, and that in one process goes on being the weight's own: "
    "read it from the model again below the block, or take a copy inside (`w.clone()`, `copy.deepcopy(state)`)"
)
EARLIER = (
    "a tensor of {name} that was made before the model was set up for training, in the same cell, and that in one "
    "process goes on being the weight's own: make it below the line that makes the optimizer, or that calls setup(), "
    "or as a copy (`w.clone()`, `copy.deepcopy(state)`)"
)
GRADIENT = (
    "{name} was taken out of `with whole(…, gradients=True)` and written to below, where it is p.grad in one process "
    "only: write to it inside of the block, or take a copy there (`p.grad.clone()`)"
)
WHY = "nbtrain_taken"
"""the attribute that has the sentence"""


class Gone(StandIn):
    """What nothing can take the place of: it says why."""

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        gone = next((one for one in tensors_in([args, kwargs]) if isinstance(one, Gone)), None)
        raise NotSupported(vars(gone).get(WHY, TAKEN.format(name="the model")))

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotSupported(vars(self)[WHY])


class Taken(NamedTuple):
    tensor: torch.Tensor
    of: list[torch.Tensor]
    """what it shows; a list, so that what takes the place of that is found here, too"""
    name: str
    form: tuple[Any, ...] | None
    """size, strides and offset of a part; None: it shows all of it; empty: it is no part that could be shown"""


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
def hand_over(taken: list[Taken], alike: bool, replaced: Callable[[Any], None], why: str = TAKEN) -> None:
    """Outside of the block again. `alike`: every rank holds as many. Collective if so; empties the list. `why`: what
    those say that are refused."""
    names = [(ref(one.tensor), one.name) for one in taken]
    pairs = [*_pairs(taken)] if alike else []
    taken.clear()
    if pairs:
        replaced(pairs)
        pairs.clear()
    for reference, name in names:
        if (held := reference()) is not None and not is_divided(held):
            give_up(held, name, why)


def give_up(tensor: torch.Tensor, name: str, why: str = TAKEN) -> None:
    become([tensor], Gone)
    vars(tensor)[WHY] = why.format(name=name)


def take_back(tensor: torch.Tensor) -> None:
    """It can be used again."""
    if vars(tensor).pop(WHY, None) is not None:
        become([tensor])


def _pairs(taken: Sequence[Taken]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for one in taken:
        with as_plain_tensors():
            follows = one.form != () and one.tensor.dtype == one.of[0].dtype and not one.tensor.requires_grad
        if follows and (shows := showing(one.of[0], one.form)) is not None:
            yield one.tensor, shows
        elif is_divided(one.tensor):  # it cannot be of another class
            stands = torch.zeros((), dtype=one.of[0].dtype).expand(one.of[0].shape)
            give_up(stands, one.name)
            yield one.tensor, stands


def showing(p: torch.Tensor, form: tuple[Any, ...] | None) -> torch.Tensor | None:
    """What goes on showing this in a cell; None: nothing does. Collective."""
    with suppress(NotSupported):
        shows = p.detach()
        return shows if form is None else part_of(shows, *form)
    return None


def part_of(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor | None:
    """The part of this form of a tensor that lies in order. By indexing: `as_strided` counts from where the memory
    begins, which may be elsewhere on each rank. None: it is no such part."""
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], size[dim] == 1))
    sizes = [size[dim] for dim in order]
    if [stride[dim] for dim in order] == [*torch.empty(sizes, device="meta").stride()]:
        whole = tensor.numel() == math.prod(size)
        part = (tensor if whole else tensor.view(-1)[offset : offset + math.prod(size)]).view(sizes)
        return part if order == [*range(len(size))] else part.permute([order.index(dim) for dim in range(len(size))])
    image = torch.empty(tensor.shape, device="meta")
    for dims in combinations(range(tensor.ndim), len(size)):
        wide, left = dict(zip(dims, zip(size, stride, strict=True), strict=True)), offset
        places: list[slice | int] = []
        for dim, own in enumerate(image.stride()):
            start, left = divmod(left, own)
            count, step = wide.get(dim, (0, 0))
            every = max(1, step // own)
            places.append(slice(start, start + (count - 1) * every + 1, every) if dim in wide else start)
        with suppress(IndexError):
            part = image[tuple(places)]
            if (tuple(part.shape), part.stride(), part.storage_offset()) == (tuple(size), tuple(stride), offset):
                return tensor[tuple(places)]
    return None


class Lying:
    """Where weights lie before a cell sets them up in its middle, which may give them other memory."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = [(name, tensor, _memory(tensor)) for name, tensor in named]
        self._at = [(name, StorageWeakRef(memory), *_form(t)) for name, t, memory in found if memory is not None]

    def left(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[Taken]:
        """What shows the memory of before; `named`: what they are now. In the same order on all ranks."""
        now = dict(named)
        left: dict[int, list[Any]] = {}
        for name, memory, *form in self._at:
            there = _memory(now[name]) if name in now else None
            if name in now and not memory.expired() and (there is None or memory_id(there) != memory.cdata):
                left.setdefault(memory.cdata, []).append((name, *form))
        found = []
        kinds = torch.Tensor, if_imported("torch.distributed.tensor", "DTensor")
        in_rows = if_imported("nbtrain.strategies.kit.dtensor_operations", "shown_by")
        for tensor in [value for value in gc.get_objects() if type(value) in kinds] if left else ():
            if isinstance(tensor, torch.nn.Parameter):
                continue
            if type(tensor) is not torch.Tensor:
                number, own = in_rows(tensor)
            elif (lies := memory_of(tensor)) is not None:
                number, own = memory_id(lies), _form(tensor)
            else:
                continue
            for name, size, stride, offset in left.get(number, ()):
                at = own[2] - offset
                if not (0 <= at < size.numel() and tensor.numel() and tensor.dtype == now[name].dtype):
                    continue
                in_order = stride == torch.empty(size, device="meta").stride()
                part = None if own == (size, stride, offset) else (*own[:2], at) if in_order else ()
                found.append(Taken(tensor, [now[name]], name, part))
        return sorted(found, key=lambda one: repr(one[2:]))


def _memory(p: torch.Tensor) -> torch.UntypedStorage | None:
    """Also of one in pieces: this rank's part's."""
    return local(p).untyped_storage() if is_divided(p) else memory_of(p)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    """Of one in pieces the whole's, which lies by itself."""
    return tensor.size(), tensor.stride(), 0 if is_divided(tensor) else int(tensor.storage_offset())
