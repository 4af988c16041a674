"""A tensor that one rank owns and the others have a stand-in for, as a cell sees it: who touches it has it whole.

Between the steps of a cell an optimizer's dealt-out state is of this class, on its owner, too. `state[p]["exp_avg"]`
read, copied, saved or edited is then what one process has: each operation brings the tensor to every rank, so all of
them have to come to the line. What was edited, or may be through a view, stays whole until the next step, which goes
on with what the owner has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.gradient_stand_in import StandIn
from nbtrain.strategies.kit.owned_tensors import stand_in

OF = "nbtrain_owned"
"""The attribute that says who has it; while a cell runs."""
SAME_OBJECT = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous", "requires_grad_"})
"""They return the very tensor where there is nothing to do."""
EXPOSING = frozenset({"numpy", "__array__", "__dlpack__", "set_"})
"""What they return shows its memory, and is no tensor; or they give it other memory."""
TOGETHER = "copy the values on every rank (`state = copy.deepcopy(optimizer.state_dict())`), above `if rank == 0:`"


class Shared:
    """Who owns a tensor, of which `OptimizerShares`."""

    __slots__ = ("device", "owner", "strategy", "whole")

    def __init__(self, strategy: str, owner: int, device: torch.device, whole: dict[int, Any]) -> None:
        self.strategy, self.owner, self.device = strategy, owner, device
        self.whole = whole
        """id → (tensor, this): those that stay whole until the next step"""


class FetchedTensor(StandIn):
    """What reads it or writes to it has the whole, on every rank."""

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in SAME_OBJECT and type(args[0]) is cls:
            with tensors.as_plain_tensors():
                if func(*args, **kwargs) is args[0]:
                    return args[0]
        return _on_whole(func, name, args, kwargs)


def hand_out(tensor: torch.Tensor, shared: Shared) -> None:
    """From now on it is brought to whoever touches it; what it has on this rank stays as it is."""
    if tensor.__class__ is torch.Tensor:
        tensor.__class__ = FetchedTensor
        vars(tensor)[OF] = shared


def take_back(tensor: torch.Tensor) -> None:
    """It is an ordinary tensor again."""
    if tensor.__class__ is FetchedTensor:
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]
        vars(tensor).pop(OF, None)


def put_away(tensor: torch.Tensor, shared: Shared, rank: int) -> None:
    """It was whole for a while."""
    if shared.owner != rank:
        tensor.data = stand_in(tensor)
    hand_out(tensor, shared)


@torch.no_grad()
def bring(tensor: torch.Tensor, shared: Shared) -> None:
    """Its numbers to every rank, in place. Collective."""
    rank = dist.get_rank()
    mine = tensor if shared.owner == rank else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    sent = mine.detach().contiguous().view(-1).to(shared.device)
    if sent.numel():
        try:
            dist.broadcast(sent.view(torch.uint8), shared.owner)
        except NotSupported as error:
            raise NotSupported(
                f"{error}. Under {shared.strategy} an optimizer's state is divided among the ranks, and what reads or "
                f"edits it needs every rank: {TOGETHER}, or take --strategy ddp"
            ) from None
    if shared.owner != rank:
        mine.copy_(sent.view(mine.shape))
        tensor.data = mine


def touched(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the arguments of a call, or in what is about to be saved."""
    if type(value) is FetchedTensor:
        yield value
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from touched(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from touched(one)


def _on_whole(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    rank = dist.get_rank()
    held = [(t, vars(t)[OF]) for t in {id(t): t for t in touched([args, kwargs])}.values()]
    opened: list[tuple[torch.Tensor, Shared]] = []
    keep = False
    try:
        for tensor, shared in held:
            take_back(tensor)
            opened.append((tensor, shared))
            bring(tensor, shared)
        versions = [tensors.version(tensor) for tensor, _ in held]
        result = func(*args, **kwargs)
        written = versions != [tensors.version(tensor) for tensor, _ in held]
        keep = written or name in EXPOSING or _shows(result, [tensor for tensor, _ in held])
        return result
    finally:
        for tensor, shared in opened:
            if keep:
                shared.whole[id(tensor)] = tensor, shared
            else:
                put_away(tensor, shared, rank)


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
