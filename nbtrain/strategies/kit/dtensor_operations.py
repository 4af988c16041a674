"""What a cell does to tensors in pieces gives what it would give with the whole: draws, new tensors, copied rows.

torch's DTensor computes most operations by pieces. While a cell runs, these are computed here, on every rank alike: the
whole is put together, the operation runs on it, and each rank takes its part of what was written.

- Random numbers: torch would draw on each rank for its own rows, from the same numbers. All ranks draw the whole, from
  the random state of one process (`random_draws.py`).
- Operations that torch has no rule for.
- New tensors (`p.new_zeros(3)`) are ordinary ones: nobody divides them.
- `r = w.data[1]` is a view in one process, and a copy where the row lies on another rank. What is written to the copy,
  or to what shows it, is written to the tensor, and who reads it after the tensor was written to has it anew. Nothing
  is watched before rows have been copied.
- Who keeps `d = p.data` keeps the numbers when `p.data = other` gives the parameter other memory.

All but new tensors need every rank, as an operation on tensors in pieces may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.compat import dtensor, fsdp2
from nbtrain.compat.autograd_engine import is_plain
from nbtrain.compat.dtensor import local as local_part
from nbtrain.compat.pytree import tree_leaves, tree_map_only
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners
from nbtrain.strategies.kit import collective_calls
from nbtrain.strategies.kit.random_draws import shared_random_state

WRITE_TOO = frozenset({
    "__setitem__", "__imul__", "__iadd__", "__isub__", "__itruediv__", "__ipow__", "__iand__", "__ior__", "__ixor__",
    "__ifloordiv__", "__imod__",
})  # fmt: skip
"""Functions that write to their first argument, besides those whose name ends with `_`."""
PLAINLY = frozenset({
    "__get__", "__set__", "__delete__", "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex",
    "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel", "requires_grad_", "size", "storage_offset",
    "stride",
})  # fmt: skip
"""Functions that read no numbers, so one rank may call them alone: `r.shape`, and `r.T`, which is a view."""

WRAPPED = (
    "torch.func (jvp, vmap, grad) cannot follow weights in pieces under fsdp: differentiate by the input, take "
    "torch.autograd.grad, or use --strategy ddp"
)

Function = Callable[..., Any]
Compute = Callable[[Any, Any, Any], Any]


def put(listeners: Listeners) -> None:
    """Put these in place while a cell runs."""
    numbers[0] = 0
    listeners.hook(dtensor.compute_by(dtensor.RANDOM, _copies.passing_on(_draw)))
    listeners.hook(dtensor.compute_by(dtensor.NEW, _new))
    listeners.hook(dtensor.compute_by(dtensor.WITHOUT_RULE, _copies.passing_on(computed)))
    _copies.put(listeners)


# --- the whole and its parts -----------------------------------------------------------------------


def put_together(tensor: DTensor) -> torch.Tensor:
    """The whole as an ordinary tensor with memory of its own. Collective where this rank has a part only."""
    plain: Any = tensor.detach()
    if not dtensor.is_divided(plain):
        raise NotSupported(WRAPPED)
    there = local_part(plain).to(plain.device_mesh.device_type)  # rows that were offloaded cannot be sent
    with told(tensor):
        whole: torch.Tensor = DTensor.from_local(
            there, plain.device_mesh, plain.placements, run_check=False, shape=plain.shape, stride=plain.stride()
        ).full_tensor()
    laid_out = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=local_part(plain).device)
    return laid_out.copy_(whole)


def replicated(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor that is the same on all ranks, as a DTensor on the mesh of `like`."""
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def take(tensor: DTensor, whole: torch.Tensor) -> None:
    """Write this rank's part of new values. Nothing is communicated."""
    there = replicated(whole.to(tensor.device_mesh.device_type), tensor)
    local_part(tensor).copy_(local_part(there.redistribute(placements=tensor.placements)))


# --- computing --------------------------------------------------------------------------------------


@torch.no_grad()
def computed(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on whole tensors; of what it writes each rank takes its part."""
    like = _first(args, kwargs)
    if local_part(like).is_meta:  # shapes are asked for, not numbers
        return dtensor.plainly(op, args, kwargs)
    wholes: dict[int, torch.Tensor] = {}

    def whole_of(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return wholes.setdefault(id(tensor), put_together(tensor) if id(tensor) not in wholes else tensor)
        return tensor

    found = op(*tree_map_only(torch.Tensor, whole_of, args), **tree_map_only(torch.Tensor, whole_of, kwargs))
    written = [one for one in dtensor.written(op, args, kwargs) if isinstance(one, DTensor)]
    for one in written:
        take(one, wholes[id(one)])
    own = {id(wholes[id(one)]): one for one in written}
    return tree_map_only(torch.Tensor, lambda t: own[id(t)] if id(t) in own else replicated(t, like), found)


@torch.no_grad()
def _draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers as one process draws them. A generator that is given stands alike on all ranks."""
    like = _first(args, kwargs)
    if local_part(like).is_meta:  # shapes are asked for, not numbers
        return dtensor.plainly(op, args, kwargs)
    given = kwargs.get("generator") is not None
    with nullcontext() if given else shared_random_state(local_part(like).device):
        found = computed(op, args, kwargs)
    if isinstance(found, DTensor) and found.shape == like.shape and not dtensor.written(op, args, kwargs):
        found = found.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in like.placements])
    return found


def _new(op: Any, args: Any, kwargs: Any) -> Any:
    """An ordinary tensor. `zeros_like` and `clone`, whose shape is the weights' own, are other operations: what they
    make is in pieces."""
    return op(local_part(args[0]), *args[1:], **kwargs)


def _first(args: Any, kwargs: Any) -> DTensor:
    return next(one for one in tree_leaves((args, kwargs)) if isinstance(one, DTensor))


# --- how often something was written ---------------------------------------------------------------


counts = [0, 0]
"""How often at most tensors in pieces were written to; and how often gradients were, by a backward or by clipping."""


numbers = [0]
"""A number of all that were written to pieces since ranks compared it, which they do at the end of a backward."""
NAN = 0x7FC0
"""what stands for it: no two NaNs have one hash"""
MADE_BY = "_nbtrain_numbers"
"""the attribute of a tensor in pieces that was computed with numbers, or with weights: theirs is of their names"""
OWN_NUMBERS = (
    "the ranks wrote different numbers to weights, gradients or states in pieces (p.grad.mul_(c), a learning rate, the "
    "limit of a clipping), and under fsdp each rank keeps its part of one tensor. Give all ranks the same: reduce(c)"
)


def give_name(p: DTensor, name: str) -> None:
    """What is made of this weight is known as its. The name is the same on all ranks."""
    vars(p)[MADE_BY] = collective_calls.subject_of_weight(name)


def forget_name(p: DTensor) -> None:
    vars(p).pop(MADE_BY, None)


def told(tensor: DTensor) -> AbstractContextManager[None]:
    """Around what brings the ranks' parts together: they compare whether it is the same tensor, of the same numbers."""
    return collective_calls.told(abs(vars(tensor).get(MADE_BY, 0)))


def wrote(*values: Any) -> None:
    """Note that something made of these was written to a piece."""
    found = numbers_in(values)
    if found:
        numbers[0] = hash((numbers[0], found))


def numbers_in(values: Iterable[Any]) -> int:
    """A number of the numbers in these, and of those that pieces among them were computed with; 0: there are none."""
    found = 0
    for one in values:
        kind = type(one)
        if isinstance(one, float | int) and kind is not bool:
            found = hash((found, one if one == one else NAN))
        elif kind is DTensor:
            if made := vars(one).get(MADE_BY):
                found = hash((found, made))
        elif kind is list or kind is tuple:
            if inner := numbers_in(one):
                found = hash((found, inner))
        elif isinstance(one, np.number) or (kind is torch.Tensor and not one.ndim and _on_cpu(one)):
            found = hash((found, numbers_in((one.item(),))))
    return found


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_plain(tensor)


def written_by(name: str, args: Any, kwargs: Any) -> list[DTensor]:
    """The tensors in pieces that the function of this name writes to."""
    places = [kwargs["out"]] if kwargs and kwargs.get("out") is not None else []
    if args and (name in WRITE_TOO or (name.endswith("_") and not name.endswith("__"))):
        places.append(args[0])
    return [one for one in tensors_in(places, {}) if isinstance(one, DTensor)]


def tensors_in(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from (inner for inner in one if isinstance(inner, torch.Tensor))


# --- rows that were copied -------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Copy:
    """Where copied rows are from."""

    origin: DTensor
    of: Function
    """gives the rows of the origin's whole"""
    apart: bool
    """it has memory of its own"""
    stood: tuple[int, ...]
    """`counts` when it was last as the origin is"""


class _Copies:
    """Keeps rows that torch copied equal to what they are of."""

    def __init__(self) -> None:
        self.taken: Any = WeakTensorKeyDictionary()
        """this rank's part of a copy → where it is from"""
        self._listeners: Listeners | None = None
        self._watching = False
        self._met: set[int] = set()
        """ids of the copies that the function of torch is given which runs now"""
        self._passed: list[torch.Tensor] = []
        """this rank's parts of those whose writes that function has passed on already"""

    def put(self, listeners: Listeners) -> None:
        self.taken.clear()
        self._listeners, self._watching = listeners, False
        listeners.hook(dtensor.compute_by(dtensor.ROWS, self.rows))

    def rows(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operation whose result is a view of a tensor, or a copy where it cannot be one."""
        tensor: DTensor = args[0]
        try:
            found = dtensor.plainly(op, args, kwargs)
        except RuntimeError:  # in this shape the rows cannot be divided, or not be told apart
            found = computed(op, args, kwargs)
        if not local_part(tensor).is_meta:
            for number, part in enumerate([found] if isinstance(found, torch.Tensor) else found):
                # What shows rows that were copied lies in the copy: what is written to it is to go the same way.
                apart = not _shares_memory(part, tensor)
                if apart or local_part(tensor) in self.taken:
                    self._note(part, tensor, op, args[1:], kwargs, None if part is found else number, apart)
        return found

    def _note(
        self, part: Any, tensor: DTensor, op: Any, rest: Any, kwargs: Any, number: int | None, apart: bool
    ) -> None:
        def of(whole: torch.Tensor) -> torch.Tensor:
            every: Any = op(whole, *rest, **kwargs)
            found: torch.Tensor = every if number is None else every[number]
            return found

        shown = self.taken.get(local_part(tensor))
        copy = self.taken[local_part(part)] = _Copy(tensor, of, apart, tuple(counts))
        if shown is not None:  # an attribute (`r.T`) shows rows as they are, and nobody has looked whether they are new
            copy.stood = shown.stood
        if not self._watching and self._listeners is not None:
            self._watching = True
            self._listeners.hook(dtensor.compute_by(dtensor.SHOWING, self.rows))
            self._listeners.hook(dtensor.compute_by(dtensor.writing_operations(), self.passing_on(self._write)))
            self._listeners.listen(dtensor.FUNCTION, "values", self._listener)

    def passing_on(self, compute: Compute) -> Compute:
        """`compute`; what it writes to copied rows is written to what they are of, too."""

        def passing(op: Any, args: Any, kwargs: Any) -> Any:
            written = [one for one in dtensor.written(op, args, kwargs) if self._is_copy(one)] if self.taken else []
            for one in written:
                if id(local_part(one)) not in self._met:
                    self.refresh(one)
            found = compute(op, args, kwargs)
            for one in written:
                self._pass_on(one)
                if self._met:
                    self._passed.append(local_part(one))
            return found

        return passing

    def _write(self, op: Any, args: Any, kwargs: Any) -> Any:
        """torch would not write by pieces to what lies whole on every rank."""
        return (computed if self._is_copy(args[0]) else dtensor.plainly)(op, args, kwargs)

    def _is_copy(self, one: Any) -> bool:
        return isinstance(one, DTensor) and local_part(one) in self.taken

    def _listener(self, plainly: Function) -> Function:
        """Around functions of torch: one may run several operations, or one on many tensors."""

        def function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in PLAINLY or not self.taken:
                return plainly(func, types, args, kwargs)
            given = (one for one in tensors_in(args, kwargs) if isinstance(one, DTensor))
            met = {id(local_part(one)): one for one in given if self._is_copy(one)}
            if not met:
                return plainly(func, types, args, kwargs)
            before, self._met = self._met, self._met | met.keys()
            passed, self._passed = self._passed, []
            try:
                for number, one in met.items():
                    if number not in before:
                        self.refresh(one)
                found = plainly(func, types, args, kwargs)
                for one in written_by(name, args, kwargs):
                    if not any(local_part(one) is part for part in self._passed):
                        self._pass_on(one)
            finally:
                self._met, self._passed = before, passed + self._passed if before else []
            return found

        return function

    @torch.no_grad()
    def refresh(self, part: DTensor) -> None:
        """Read copied rows anew. Collective where their origin may have been written to since."""
        copy = self.taken.get(local_part(part))
        if copy is not None and copy.stood != tuple(counts):
            self.refresh(copy.origin)
            if copy.apart:
                take(part, copy.of(put_together(copy.origin)))
            copy.stood = tuple(counts)

    @torch.no_grad()
    def _pass_on(self, part: DTensor) -> None:
        copy = self.taken.get(local_part(part))
        if copy is not None:
            if copy.apart:
                whole = put_together(copy.origin)
                copy.of(whole).copy_(put_together(part))
                take(copy.origin, whole)
            copy.stood = tuple(counts)
            self._pass_on(copy.origin)

    def leave(self, tensor: DTensor) -> None:
        """The tensor is about to get other memory: views go on showing the memory that it has now."""
        stays: DTensor | None = None
        for copy in list(self.taken.values()):
            if copy.origin is tensor:
                stays = copy.origin = tensor.detach() if stays is None else stays
        own = self.taken.pop(local_part(tensor), None)
        if stays is not None and own is not None:
            self.taken[local_part(stays)] = own


_copies = _Copies()


def fresh(tensor: DTensor) -> None:
    """Called before a tensor is read otherwise than by a function of torch."""
    if _copies.taken:
        _copies.refresh(tensor)


def _shares_memory(part: Any, tensor: DTensor) -> bool:
    mine = local_part(part).untyped_storage()
    return mine.nbytes() == 0 or mine.data_ptr() == local_part(tensor).untyped_storage().data_ptr()


# --- memory that is left ---------------------------------------------------------------------------

_weights: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""id of a parameter → what torch gathers of it. No weak reference to the parameter itself: torch refuses to swap a
tensor that has one, and so moves a model in pieces (`model.to`)."""


def know(weight: Any) -> None:
    """Remember a weight of fully_shard's, so that `give` can give it memory."""
    _weights[id(fsdp2.sharded(weight))] = weight


@torch.no_grad()
def give(tensor: DTensor, part: torch.Tensor) -> None:
    """Make `part` this rank's part, the very memory. Who holds the part that the tensor had keeps it."""
    counts[0] += 1
    mine = local_part(tensor)
    if part.device != mine.device or part.stride() != mine.stride() or type(part) is not type(mine):
        part = torch.empty_like(mine).copy_(part)
    _copies.leave(tensor)
    weight = _weights.get(id(tensor))
    if weight is None or fsdp2.sharded(weight) is not tensor:
        mine.data = part
    else:
        fsdp2.give_memory(weight, part)
