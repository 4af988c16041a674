"""Tensors that are whole on one rank, their owner; the others have a stand-in of the same shape over one number.

A stand-in answers what asks for its form. What reads its numbers or writes to them is for each class to say: a
gradient's refuses, and can be zeroed. Between the steps of a cell an optimizer's state is a `FetchedTensor`, on its
owner, too: each operation brings the tensor to every rank, so all of them have to come to the line. What was edited, or
may be through a view, stays whole until the next step, which goes on with what the owner has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Piece

G = TypeVar("G", bound="GradientStandIn")

ANSWERED = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_leaf",
        "requires_grad", "grad_fn", "grad", "size", "dim", "numel", "nelement", "stride",
        "is_floating_point", "is_complex", "element_size", "is_contiguous", "__hash__", "__len__", "get_device",
        "output_nr", "retains_grad", "is_quantized", "is_mkldnn", "is_nested",
        "is_inference", "names", "is_mps", "is_xpu",
        # what a search for memory asks everything it finds
        "untyped_storage", "storage_offset", "data_ptr", "nbytes", "itemsize", "is_pinned", "is_shared",
    } | tensors.ASKS_OF_FORM
)  # fmt: skip
"""Functions of a tensor, as `__torch_function__` is told their names, that a stand-in answers as the whole does."""
OF = "nbtrain_owned"
"""The attribute that says who has it; while a cell runs."""
SAME_OBJECT = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous", "requires_grad_"})
"""They return the very tensor where there is nothing to do."""
EXPOSING = frozenset({"numpy", "__array__", "__dlpack__", "set_"})
"""What they return shows its memory, and is no tensor; or they give it other memory."""
TOGETHER = "copy the values on every rank (`state = copy.deepcopy(optimizer.state_dict())`), above `if rank == 0:`"


def stand_in(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, one number in memory: NaN, so that computing with it shows."""
    empty = math.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), empty, dtype=like.dtype, device=like.device).expand(like.shape)


class OwnedTensor(Piece):
    """A tensor that is whole on its owner. `get`: gives what this rank has in its place; `mine`: that is the whole;
    `speaks`: this rank is the owner, or the first of several; `cut`: who dealt it out."""

    def __init__(self, get: Callable[[], torch.Tensor], mine: bool, speaks: bool, cut: object) -> None:
        tensor = get()
        self.shape, self.dtype, self.cut = tensor.shape, tensor.dtype, cut
        self._get, self._mine, self._speaks = get, mine, speaks

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [(0, self.shape.numel())] if self._speaks else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self._get().detach().reshape(-1)] if self._speaks else []

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        if self._mine:
            self._get().copy_(whole.view(self.shape))


def dealt_out(sizes: Sequence[int], owners: int) -> list[int]:
    """Who owns what, so that each has about as much: the largest first, to whom has least. The same on every rank."""
    load = [0] * owners
    found = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[i] = load.index(min(load))
        load[found[i]] += sizes[i]
    return found


# --- stand-ins -------------------------------------------------------------------------------------


class StandIn(torch.Tensor):
    """Answers what asks for its form. `asked` decides about every other function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "__get__":  # of a property
            name = getattr(func.__self__, "__name__", name)
        if name in ANSWERED:
            with tensors.as_plain_tensors():
                return func(*args, **kwargs)
        return cls.asked(func, name, args, kwargs)

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class GradientStandIn(StandIn):
    """Stands in the place of `p.grad`. It can be zeroed; what reads it raises."""

    text: ClassVar[str]
    """how it is printed: "a gradient that another rank has" """
    refusal: ClassVar[str]
    """the error where its numbers are read or written"""

    @classmethod
    def of(cls: type[G], p: torch.Tensor, dtype: torch.dtype | None = None) -> G:
        """A stand-in of the parameter's shape, with one number in memory."""
        return torch.zeros((), dtype=dtype or p.dtype, device=p.device).expand(p.shape).as_subclass(cls)

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("__repr__", "__format__"):
            return f"<{cls.text}, {tuple(args[0].shape)}>"
        if name in ("zero_", "detach_", "requires_grad_"):  # the last two on the way to being zeroed
            return args[0]
        raise NotSupported(cls.refusal)


# --- an optimizer's state in a cell -----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Ownership:
    """Who owns a tensor, and which tensors of its `DividedState` are whole just now."""

    strategy: str
    owner: int
    device: torch.device
    whole: dict[int, Any]
    """id → (tensor, its ownership): those that stay whole until the next step"""


class FetchedTensor(StandIn):
    """An owned tensor that is brought to every rank by whatever reads it or writes to it."""

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in SAME_OBJECT and type(args[0]) is cls:
            with tensors.as_plain_tensors():
                if func(*args, **kwargs) is args[0]:
                    return args[0]
        return _on_whole(func, name, args, kwargs)


def hand_out(tensor: torch.Tensor, ownership: Ownership) -> None:
    """Make a `FetchedTensor` of it, in place. Its content on this rank stays."""
    if tensor.__class__ is torch.Tensor:
        tensor.__class__ = FetchedTensor
        vars(tensor)[OF] = ownership


def take_back(tensor: torch.Tensor) -> None:
    """Make an ordinary tensor of it again."""
    if tensor.__class__ is FetchedTensor:
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]  # it becomes another class
        vars(tensor).pop(OF, None)


def put_away(tensor: torch.Tensor, ownership: Ownership, rank: int) -> None:
    """Let go of what `bring` brought to this rank, and make it a `FetchedTensor` again."""
    if ownership.owner != rank:
        tensor.data = stand_in(tensor)
    hand_out(tensor, ownership)


@torch.no_grad()
def bring(tensor: torch.Tensor, ownership: Ownership) -> None:
    """Send its numbers from the owner to every rank, in place. Collective."""
    rank = dist.get_rank()
    mine = tensor if ownership.owner == rank else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    sent = mine.detach().contiguous().view(-1).to(ownership.device)
    if sent.numel():
        try:
            dist.broadcast(sent.view(torch.uint8), ownership.owner)
        except NotSupported as error:
            raise NotSupported(
                f"{error}. Under {ownership.strategy} an optimizer's state is divided among the ranks, and what reads "
                f"or edits it needs every rank: {TOGETHER}, or take --strategy ddp"
            ) from None
    if ownership.owner != rank:
        mine.copy_(sent.view(mine.shape))
        tensor.data = mine


def _fetched_in(value: Any) -> Iterator[torch.Tensor]:
    if type(value) is FetchedTensor:
        yield value
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _fetched_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _fetched_in(one)


def _on_whole(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    rank = dist.get_rank()
    held = [(t, vars(t)[OF]) for t in {id(t): t for t in _fetched_in([args, kwargs])}.values()]
    opened: list[tuple[torch.Tensor, Ownership]] = []
    keep = False
    try:
        for tensor, ownership in held:
            take_back(tensor)
            opened.append((tensor, ownership))
            bring(tensor, ownership)
        versions = [tensors.version(tensor) for tensor, _ in held]
        result = func(*args, **kwargs)
        written = versions != [tensors.version(tensor) for tensor, _ in held]
        keep = written or name in EXPOSING or _shows(result, [tensor for tensor, _ in held])
        return result
    finally:
        for tensor, ownership in opened:
            if keep:
                ownership.whole[id(tensor)] = tensor, ownership
            else:
                put_away(tensor, ownership, rank)


def _shows(result: Any, held: list[torch.Tensor]) -> bool:
    """Whether a tensor in what a function returned shares memory with one of these."""
    memory = {tensors.memory_id(one.untyped_storage()) for one in held}
    todo = [result]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            if one.layout == torch.strided and tensors.memory_id(one.untyped_storage()) in memory:
                return True
        elif isinstance(one, (list, tuple)):
            todo.extend(one)
    return False
