"""What functions of torch do to tensors in pieces while a cell runs: the same as to the whole, or one sentence.

Each function that is given one comes here first, and is decided by what is known of it (`known`):

- by pieces, by torch: what is on the list here or is elementwise by torch's own schemas, among tensors that are divided
  alike, and sums. Autograd follows a few of them by pieces;
- on the whole, by every rank alike: what makes something new, by torch's schemas, gives an ordinary tensor, through
  which autograd goes: each rank has the gradient of the whole, their mean is taken, and each rank keeps its part. Of
  what is written each rank takes its part, and what is written must be the same on all ranks. A view is a copy that
  stands for it. Random numbers are those that one process draws;
- anything else is refused, with the line that works.

Pieces are divided by rows, always: no sum of which each rank has a summand is seen by the loop. All but what is
elementwise needs every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import NbtrainError, NotSupported
from nbtrain.compat import dtensor, tensors
from nbtrain.compat.autograd_engine import is_plain
from nbtrain.compat.dtensor import local as local_part
from nbtrain.compat.intercept import Listeners, While
from nbtrain.strategies.fsdp import piece_memory
from nbtrain.strategies.fsdp.refusals import refuse_differing, tensors_in, unknown
from nbtrain.strategies.fsdp.whole_values import full_tensor_in_graph
from nbtrain.strategies.kit import dtensor_operations, functional_transforms
from nbtrain.strategies.kit.dtensor_operations import copies_made, counts, full_tensor, is_copy, show, thawed, write
from nbtrain.strategies.kit.known_functions import ASKS, FORM, RESHAPES, SHOWING, Known, known, written
from nbtrain.strategies.kit.random_draws import shared_random_state
from nbtrain.strategies.kit.row_shards import by_rows, cut
from nbtrain.strategies.kit.written_numbers import MADE_BY, numbers_in, wrote

COMPUTED = (
    "`{}` writes to a tensor that is in pieces, as weights are, and autograd cannot follow that under fsdp. Compute a "
    "new tensor: a = a * b, and not a *= b or a.mul_(b); a = torch.stack([b, c]), and not a[0] = b"
)

Function = Callable[..., Any]


def _listener(plainly: Function) -> Function:
    """`plainly`: the function as torch's own class has it called."""

    def function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and func not in SHOWING:
            return plainly(func, types, args, kwargs)
        if name in FORM:
            thawed[0] += name == "requires_grad_" and isinstance(args[0], torch.nn.Parameter)
            return plainly(func, types, args, kwargs)
        if name == "__set__":
            counts[0] += 1
            thawed[0] += type(args[1]) is bool
            given = args[1]  # most often a gradient, or none
            if given is None or (type(given) is DTensor and MADE_BY not in vars(given)):
                return plainly(func, types, args, kwargs)
            wrote(given)
            return plainly(func, types, piece_memory.set_grad(func, args), kwargs)
        special = piece_memory.FUNCTIONS.get(name)
        if special is not None and isinstance(args[0], DTensor):
            return special(func, args, kwargs)
        pieces, others = _told_apart(args, kwargs)
        if not pieces:
            return plainly(func, types, args, kwargs)
        if functional_transforms.meets(name):
            return functional_transforms.call(func, args, kwargs)
        if name == "__get__":
            return _viewed(func, args, kwargs)
        if name in ASKS and (others or len(pieces) > 1):
            return _like_another(name, *args, *kwargs.values())
        what = known(func)
        targets = written(what, args, kwargs, DTensor) if what.written or kwargs else []
        if targets:
            counts[0] += 1
            wrote(what.number, *args[1:], *kwargs.values())
        if (what.by_pieces and _alike(name, pieces, others, args)) or (what.sums and _sum_of_all(args, kwargs)):
            result = _by_pieces(plainly, what, func, types, args, kwargs, pieces, bool(targets))
            if result is not NotImplemented:
                return result
        if targets:
            return _write(plainly, what, func, types, args, kwargs, targets)
        return _read(plainly, what, func, types, args, kwargs, pieces[0], others)

    return function


def _told_apart(args: Any, kwargs: Any) -> tuple[list[DTensor], list[torch.Tensor]]:
    """(tensors in pieces, ordinary ones). Fast, as an optimizer's step comes here many times."""
    pieces: list[DTensor] = []
    others: list[torch.Tensor] = []
    for operand in (*args, *kwargs.values()) if kwargs else args:
        if type(operand) is DTensor:
            pieces.append(operand)
        elif isinstance(operand, torch.Tensor | list | tuple):
            for inner in operand if isinstance(operand, list | tuple) else (operand,):
                if isinstance(inner, DTensor):
                    pieces.append(inner)
                elif isinstance(inner, torch.Tensor):
                    others.append(inner)
    return pieces, others


def _mapped(change: Callable[[torch.Tensor], Any], args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    def of(operand: Any) -> Any:
        if isinstance(operand, torch.Tensor):
            return change(operand)
        if type(operand) in (list, tuple):
            return type(operand)(change(inner) if isinstance(inner, torch.Tensor) else inner for inner in operand)
        return operand

    return tuple(map(of, args)), {key: of(value) for key, value in kwargs.items()}


# --- by pieces ---------------------------------------------------------------------------------------


def _alike(name: str, pieces: list[DTensor], others: list[torch.Tensor], args: Any) -> bool:
    """Whether all are divided alike. torch takes ordinary numbers besides, where autograd is not to follow."""
    for tensor in others:
        if tensor.ndim > 0 or (tensor.requires_grad and torch.is_grad_enabled()):
            return False
    if len(pieces) > 1 and (name[0] != "_" or name[1] == "_"):  # lists are of several shapes
        shape = pieces[0].shape
        for tensor in pieces:
            if tensor.shape != shape:
                return False
    return not (copies_made and any(map(is_copy, pieces))) and not (name == "where" and len(args) == 1)


def _sum_of_all(args: Any, kwargs: Any) -> bool:
    """Whether it is a sum of all numbers, or a norm that is one: not of those along a dimension, nor the largest."""
    order, *more = (*args[1:], *kwargs.values()) or (None,)
    return (
        not any(more)
        and (order is None or order == "fro" or (type(order) in (int, float) and order in (1, 2)))
        and not any(map(is_copy, tensors_in(args, {})))
    )


def _by_pieces(
    plainly: Function, what: Known, func: Any, types: Any, args: Any, kwargs: Any, pieces: list[DTensor], writes: bool
) -> Any:
    """What torch computes by pieces; NotImplemented where it does not."""
    recorded = torch.is_grad_enabled() and any(piece.requires_grad for piece in pieces)
    given, named = _mapped(_aligned, args, kwargs) if recorded and what.followed and not writes else (args, kwargs)
    try:
        result = plainly(func, types, given, named)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NbtrainError | torch.OutOfMemoryError | dist.DistError):
            raise
        if writes and not isinstance(error, NotImplementedError):
            raise
        return NotImplemented
    if not writes and isinstance(result, torch.Tensor | list | tuple):
        made = numbers_in((*args, *kwargs.values()))
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in((result,), {}):
            if type(tensor) is DTensor:
                if made:
                    vars(tensor).setdefault(MADE_BY, made)  # it may be what was given
                if recorded and not what.followed and tensor.grad_fn is not None:
                    return NotImplemented
        if what.sums and not local_part(pieces[0]).is_meta:
            ((result,), _) = _mapped(full_tensor_in_graph, (result,), {})
    return result


class _Aligned(torch.autograd.Function):
    """The tensor itself. Its gradient is divided as the tensor is, however the gradient was computed."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Any:
        ctx.placements = tensor.placements
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> Any:
        return gradient.redistribute(placements=ctx.placements)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and tensor.requires_grad and tensor.is_leaf:
        aligned: torch.Tensor = _Aligned.apply(tensor)
        return aligned
    return tensor


# --- on the whole --------------------------------------------------------------------------------------


def _drawing(what: Known, like: DTensor, args: Any, kwargs: Any) -> Any:
    """Around what draws random numbers. A generator that is given stands alike on all ranks."""
    given = any(isinstance(operand, torch.Generator) for operand in (*args, *kwargs.values()))
    return shared_random_state(local_part(like).device) if what.draws and not given else nullcontext()


def _read(
    plainly: Function, what: Known, func: Any, types: Any, args: Any, kwargs: Any, like: DTensor, others: Any
) -> Any:
    """What cannot be computed by pieces, and writes to none. `others`: the ordinary tensors that it is given."""
    if what.below or local_part(like).is_meta:
        return plainly(func, types, args, kwargs)
    if what.shows and not (func.__name__ == "__getitem__" and _picks(args[1])):
        return _viewed(func, args, kwargs)
    if not what.makes and not (what.written and what.in_form):
        raise unknown(func.__name__, like)
    wholes: list[torch.Tensor] = []
    given, named = _mapped(lambda operand: _noted(operand, wholes), args, kwargs)
    versions = _versions(wholes)
    with _drawing(what, like, args, kwargs):
        result = func(*given, **named)
    if versions != _versions(wholes):  # `F.embedding(x, w, max_norm=1)`
        raise unknown(func.__name__, like)
    if _shows_one(result, wholes):
        return _viewed(func, args, kwargs)
    noise = isinstance(result, torch.Tensor) and not result.requires_grad and dtensor.facts(func.__name__).draws
    return cut(like, result) if noise and not others and result.shape == like.shape and by_rows(like) else result


def _noted(tensor: torch.Tensor, wholes: list[torch.Tensor]) -> torch.Tensor:
    """The whole, added to `wholes`."""
    if not isinstance(tensor, DTensor):
        return tensor
    wholes.append(full_tensor_in_graph(tensor))
    return wholes[-1]


def _versions(wholes: list[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensors.version(tensor) for tensor in wholes]


def _shows_one(result: Any, wholes: list[torch.Tensor]) -> bool:
    """Whether a result is in the memory of one of these, as that of `F.dropout(w, training=False)` is."""
    results = [tensor for tensor in tensors_in((result,), {}) if not isinstance(tensor, DTensor) and is_plain(tensor)]
    return any(tensors.of_one_memory(tensor, full) for tensor in results for full in wholes)


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = next(operand for operand in tensors_in(args, kwargs) if isinstance(operand, DTensor))

    def view(full: torch.Tensor) -> Any:
        given, named = _mapped(lambda operand: full if operand is tensor else operand, args, kwargs)
        return func(*given, **named)

    if func.__name__ in RESHAPES and not is_copy(tensor) and not (tensor.requires_grad and torch.is_grad_enabled()):
        shape_shown = view(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        if (shape_shown.shape, shape_shown.stride(), shape_shown.dtype) == (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        ):
            return tensor.detach()  # `w.reshape(len(w), -1)` of a matrix
    return show(tensor, view, full_tensor_in_graph(tensor))


def _picks(index: Any) -> bool:
    """Whether an index makes a new tensor of what it picks."""
    return any(
        isinstance(part, torch.Tensor | list | np.ndarray) for part in (index if type(index) is tuple else [index])
    )


def _like_another(name: str, tensor: torch.Tensor, other: torch.Tensor, *more: Any) -> torch.Tensor:
    """As `to` and `view_as` do with one that may be in pieces: it is asked for its form only."""
    converted: torch.Tensor
    if name in ("to", "type_as"):
        converted = tensor.to((local_part(other) if isinstance(other, DTensor) else other).device, other.dtype, *more)
    else:
        converted = getattr(tensor, name.partition("_")[0])(other.shape)
    return converted


# --- writing -------------------------------------------------------------------------------------------


def _write(
    plainly: Function, what: Known, func: Any, types: Any, args: Any, kwargs: Any, targets: list[DTensor]
) -> Any:
    """What cannot be written by pieces: the same to all ranks' rows of an ordinary tensor, or to the whole."""
    name, first = func.__name__, targets[0]
    if what.below or local_part(first).is_meta:
        return plainly(func, types, args, kwargs)
    if not what.starts and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args, kwargs)):
        if kwargs.get("out") is None and not all(tensor.is_leaf and tensor.requires_grad for tensor in targets):
            raise NotSupported(COMPUTED.format(name))
        return plainly(func, types, args, kwargs)  # torch says that a leaf, or `out`, cannot be written to so
    if not (what.in_form or (what.makes and not what.written)):
        raise unknown(name, first)
    refuse_differing(name, first, args, kwargs)
    given = list(tensors_in(args, kwargs))
    alike = all(tensor.shape == first.shape or not tensor.ndim for tensor in given) and not any(map(is_copy, given))
    if what.by_pieces and alike and len(targets) == 1 and first is args[0]:
        rows = _mapped(
            lambda operand: operand if isinstance(operand, DTensor) or not operand.ndim else cut(first, operand),
            args,
            kwargs,
        )
        return plainly(func, types, *rows)
    return _write_whole(what, func, args, kwargs, targets)


@torch.no_grad()
def _write_whole(what: Known, func: Any, args: Any, kwargs: Any, targets: list[DTensor]) -> Any:
    wholes: dict[int, torch.Tensor] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and id(tensor) not in wholes:
            wholes[id(tensor)] = full_tensor(tensor)
        return wholes.get(id(tensor), tensor)

    given, named = _mapped(whole, args, kwargs)
    with _drawing(what, targets[0], args, kwargs):
        result = func(*given, **named)
    for piece in targets:
        if wholes[id(piece)].shape != piece.shape:
            raise unknown(func.__name__, piece)
        write(piece, wholes[id(piece)])
    own = {id(wholes[id(piece)]): piece for piece in targets}
    ((answer,), _) = _mapped(lambda answer_tensor: own.get(id(answer_tensor), answer_tensor), (result,), {})
    return answer


# --- while a cell runs ---------------------------------------------------------------------------------


def _put(listeners: Listeners) -> None:
    dtensor_operations.counts[0] += 1  # a block `with whole(…)` may have written to them, of which views know nothing
    functional_transforms.put(listeners)
    listeners.listen(dtensor.FUNCTION, "values", _listener)
    listeners.listen("torch.distributed.tensor.DTensor.data", "values", piece_memory.data)
    listeners.listen("torch.distributed.tensor.DTensor.__repr__", "values", _shown)


listening: While[Any] = While(_put)
"""Components whose cells run."""


def _shown(old: Function) -> Function:
    """The text of a copy says what it shows; other tensors' that it is a part, as tracebacks ask for it on one rank."""
    return lambda tensor: repr(local_part(tensor)) if is_copy(tensor) else old(tensor)
