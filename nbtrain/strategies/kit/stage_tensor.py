"""A tensor that lies whole on one rank, and what functions do to it: the same as in one process, or one sentence.

Under `pipeline` all ranks run the same cell, so whatever it does with such a tensor outside of a stage, it does on
every rank at the same place. What is read is sent by its rank to all; what is written is written where it lies; what is
only asked for its form is answered as it is. A view (`p.data`, `p[0]`, an entry of a `state_dict()`) lies where its
tensor does, and goes on showing it. Which of these a function does torch's own schemas tell (known_functions.py); where
they do not, it is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import autograd_engine, dtensor, pytree, tensors
from nbtrain.compat.autograd_engine import is_plain
from nbtrain.strategies.kit import functional_transforms
from nbtrain.strategies.kit.known_functions import FORM, SHOWING, known, written
from nbtrain.strategies.kit.named_tensors import no_node, unknown
from nbtrain.strategies.kit.owned_tensors import ANSWERED, stand_in
from nbtrain.strategies.kit.stage_spot import SPOT, Spot, StageContext, send_to_all, spot_of
from nbtrain.strategies.kit.written_numbers import wrote_whole

ON_ONE = "which under pipeline lies on one rank"
SPARSE = (
    "a sparse gradient was read or edited, which under pipeline only the rank of its stage has: step the optimizer "
    "with it as it is, let the nn.Embedding have sparse=False, or use --strategy ddp"
)
INSIDE = (
    "a forward, or a hook on a module, reads a weight or gradient of another stage ({shape}), and under pipeline a "
    "stage computes on its rank alone: read it in the loop, before or after the model is called, or use --strategy fsdp"
)
OUTSIDE = (
    "a tensor ({shape}) that lies on one rank under pipeline, and that was made outside of `with whole(…)`, "
    "as `state = model.state_dict()` is: make it in such a block, too, or use it outside. Of what was taken from the "
    "model in another block take a copy there: `copy.deepcopy(model.state_dict())`"
)
OF_WEIGHT = (
    "a parameter ({shape}) was made of a weight that under pipeline lies on one rank, as `weight_norm(layer)` and "
    "`nn.Parameter(p)` make it: do it where weights are complete, with a new optimizer in the same block: "
    "`with whole(model, optimizer): weight_norm(model[2]); optimizer = …`"
)
OVER = "it lies on one rank of a cell that has ended"

FORMS = FORM | ANSWERED
"""Functions that do not read the content of such a tensor; so are those that make another one in its form."""
STRIDES = frozenset({"stride", "is_contiguous", "dim_order"})
"""Those of them that tell how it lies in memory."""
READS = frozenset({"__array__", "numpy", "tolist"})
"""read all of it, of which torch has no schemas"""


class StageTensor(torch.Tensor):
    """A tensor on one rank, or a parameter: torch tells that by an attribute."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with tensors.as_plain_tensors():
            return call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with tensors.as_plain_tensors():
                copied = full_tensor(self).detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            elif self.requires_grad and self.is_leaf:
                copied.requires_grad_()
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, version: Any) -> Any:
        if not spot_of(self).of.open:
            raise NotSupported(OVER)
        return copy.deepcopy(self).__reduce_ex__(version)

    def set_(self, *_: Any, **__: Any) -> Any:
        raise unknown_of("set_", [self])  # it asks no `__torch_function__`

    def __str__(self) -> str:
        with tensors.as_plain_tensors():
            return str(plain_of(full_tensor(self)))

    def __format__(self, spec: str) -> str:
        with tensors.as_plain_tensors():
            return format(plain_of(full_tensor(self)), spec)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # tracebacks and debuggers call it on one rank
        where = "this rank" if spot_of(self).mine else f"rank {spot_of(self).owner}"
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"<{kind} of the shape {tuple(self.shape)} on {where}: print(...) shows it>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def is_stage_tensor(tensor: Any) -> bool:
    """Whether it lies on one rank, and a cell outside of a stage sees it."""
    return type(tensor) is StageTensor


def put(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    """Mark that the tensor lies there."""
    tensors.become([tensor], StageTensor)
    vars(tensor)[SPOT] = spot
    return tensor


def gradient_elsewhere(p: torch.Tensor, of: StageContext, owner: int, sparse: bool = False) -> torch.Tensor:
    """A stand-in for `p.grad`, which is on another rank."""
    stand_in_there = put(stand_in(p.detach()), Spot(of, owner, sparse=sparse))
    # What code sees that looks for numbers which are not finite, in the part of a gradient that a rank has.
    dtensor.pose_with_local(stand_in_there, torch.zeros(1, dtype=p.dtype, device=p.device))
    return stand_in_there


# --- its content, on every rank ----------------------------------------------------------------------


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its content, on every rank, as a part of the graph. Collective."""
    spot = spot_of(tensor)
    functional_transforms.refuse_traced(tensor if spot.base is None else spot.base)
    if spot.sparse:
        raise NotSupported(SPARSE)
    full = send_to_all(tensor, spot)
    if not spot.mine and tensor.requires_grad and torch.is_grad_enabled():
        full = _Away.apply(torch.zeros((), requires_grad=True), full)
    return full


def _given(tensor: torch.Tensor) -> torch.Tensor:
    """The same where torch.func follows what is done with it."""
    with autograd_engine.outside_transforms():
        return full_tensor(tensor) if is_stage_tensor(tensor) else tensor


def _besides(tensor: torch.Tensor) -> torch.Tensor:
    """The same of one that a function reads besides what torch.func gives it."""
    if is_stage_tensor(tensor) and tensor.requires_grad and torch.is_grad_enabled():
        # In a loss the gradient that comes to it from inside is another.
        raise functional_transforms.with_a_copy(unknown_of("torch.func", [tensor]))
    return _given(tensor)


class _Away(torch.autograd.Function):
    """The content of a tensor of another rank: its gradient is computed there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as an ordinary tensor."""
    return tensor.detach() if is_stage_tensor(tensor) else tensor


# --- functions ---------------------------------------------------------------------------------------


def call(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(name, getattr(getattr(func, "__self__", None), "__name__", ""), func, args)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_stage_tensor(leaf)]
    of = next((spot_of(leaf).of for leaf in leaves if spot_of(leaf).of.open), None)
    if of is not None and name in STRIDES:
        return func(_image(args[0]), *args[1:], **kwargs)
    words = name.split("_")
    if name in FORMS or words[-1] == "like" or words[0] == "new" or known(func).below:
        return func(*args, **kwargs)
    if of is None and (made := [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]):
        raise NotSupported(OF_WEIGHT.format(shape=tuple(made[0].shape)))
    if of is None or of.place.inside:
        foreign = next((leaf for leaf in leaves if not spot_of(leaf).mine), None)
        if foreign is not None:
            raise NotSupported((INSIDE if of is not None else OUTSIDE).format(shape=tuple(foreign.shape)))
        return func(*args, **kwargs)
    if functional_transforms.meets(name):
        return functional_transforms.call(func, args, kwargs, _given if name == autograd_engine.MAKE_DUAL else _besides)
    if of.place.everywhere:
        return _run(func, name, args, kwargs)
    if name == tensors.UNSCALES:
        return _unscale(func, of, args)
    if name.startswith(tensors.OF_EACH):
        return _each(name, args, kwargs)
    return _decided(func, name, args, kwargs)


def _decided(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """By what is known of the function."""
    what = known(func)
    targets = written(what, args, kwargs, StageTensor)
    if kwargs.get("out") is None and (what.in_form if what.written else what.makes or what.shows or name in READS):
        if what.written or targets:
            wrote_whole([what.number, *pytree.tree_leaves((args[1:], kwargs))])
        if what.shows and args and is_stage_tensor(args[0]):
            return _view(func, name, args, kwargs)
        return _run(func, name, args, kwargs, *targets[:1])
    raise unknown_of(name, pytree.tree_leaves((args, kwargs)))


def unknown_of(name: str, given: list[Any]) -> NotSupported:
    tensor = next(filter(is_stage_tensor, given))
    base = spot_of(tensor).base
    return unknown(name, tensor if base is None else base, ON_ONE)


def _attribute(kind: str, name: str, func: Any, args: Any) -> Any:
    tensor, spot = args[0], spot_of(args[0])
    if kind == "__get__":
        if name == "grad":
            return _gradient(tensor, spot)
        shown = None if isinstance(tensor, nn.Parameter) else spot.base  # nn.Module asks what it is given
        if name == "grad_fn" and shown is not None and tensor.requires_grad and spot.of.open:
            raise no_node(shown, ON_ONE)
        shows = name == "data" or func in SHOWING
        if shows and spot.of.open and not (spot.mine and spot.of.place.inside):
            if functional_transforms.meets(name):
                return func(_besides(tensor))
            return _view(func, name, args, {})
    if kind != "__set__" or name not in ("data", "grad") or args[1] is None or not spot.of.open:
        return func(*args)
    value = args[1]
    wrote_whole([value])
    if is_stage_tensor(value) and spot_of(value).owner != spot.owner:
        value = full_tensor(value).detach()
    if name == "data":
        spot.base, spot.offset, spot.memory = None, 0, object()
        spot.strides = spot_of(value).strides if is_stage_tensor(value) else _strides(value)
    if not spot.mine:
        value = stand_in(value.detach()) if name == "data" else gradient_elsewhere(value, spot.of, spot.owner)
    return func(tensor, value)


def _gradient(tensor: torch.Tensor, spot: Spot) -> torch.Tensor | None:
    grad = tensor.grad
    if grad is not None and type(grad) is torch.Tensor and spot.mine and spot.of.open:
        local = grad.detach()
        put(grad, Spot(spot.of, spot.owner, None if grad.is_sparse else _strides(grad), grad.is_sparse))
        dtensor.pose_with_local(grad, local)
    return grad


def _run(func: Any, name: str, args: Any, kwargs: Any, target: torch.Tensor | None = None) -> Any:
    """Call it on every rank, with full tensors: the owner's own, so that a gradient finds it and what is written stays.
    `target`: what it writes to; the others need no content of what lies where that does, and draw the same random
    numbers."""
    given: dict[int, torch.Tensor] = {}
    back: dict[int, torch.Tensor] = {}
    owner = None if target is None else spot_of(target).owner
    if target is not None and spot_of(target).sparse and (spot_of(target).mine or name not in ("zero_", "mul_")):
        raise NotSupported(SPARSE)

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if not is_stage_tensor(tensor):
            return tensor
        if id(tensor) not in given:
            spot = spot_of(tensor)
            if spot.owner != owner:
                operand = full_tensor(tensor)
            else:
                operand = tensor if spot.mine else _blank(tensor)
            given[id(tensor)] = operand
            back[id(operand)] = tensor
        return given[id(tensor)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, taken, (args, kwargs))
    returned = func(*args, **kwargs)
    if name in ("numpy", "__array__"):  # others would not see what one writes into it
        returned = returned.copy()
        returned.flags.writeable = False

    def kept(result: torch.Tensor) -> torch.Tensor:
        if id(result) in back or not is_plain(result):
            return back.get(id(result), result)
        spot = next(
            (spot_of(back[id(other)]) for other in given.values() if tensors.of_one_memory(result, other)), None
        )
        if spot is None or spot.of.place.everywhere:
            return result
        return put(result, Spot(spot.of, spot.owner, _strides(result)))

    return pytree.tree_map_only(torch.Tensor, kept, returned)


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device).requires_grad_(tensor.requires_grad)


def _view(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Whether it gives a view is tried on the device meta."""
    tensor, rest = args[0], args[1:]
    spot, form = spot_of(tensor), _image(tensor)
    given = pytree.tree_map_only(torch.Tensor, lambda t: _image(t) if is_stage_tensor(t) else t.to("meta"), rest)
    try:
        shown = None if spot.sparse else func(form, *given, **kwargs)
    except Exception:  # it says so itself, of the whole
        shown = None
    forms = [leaf for leaf in pytree.tree_leaves(shown) if isinstance(leaf, torch.Tensor)]
    if not forms or (
        name not in ("data", "detach")
        and not all(shown_form is form or tensors.is_view(shown_form) for shown_form in forms)
    ):
        return _run(func, name, args, kwargs)
    if forms[0] is form:
        return tensor
    if spot.mine:
        found = func(tensor, *rest, **kwargs)
    else:
        wants = tensor.requires_grad and torch.is_grad_enabled() and name not in ("data", "detach")
        found = pytree.tree_map_only(torch.Tensor, lambda t: _one_number(t, tensor).requires_grad_(wants), shown)
    leaves, base = iter(forms), tensor if spot.base is None else spot.base

    def shows(leaf: torch.Tensor) -> torch.Tensor:
        form, shown = next(leaves), Spot(spot.of, spot.owner, base=base, memory=spot.memory)
        shown.strides, shown.offset, shown.of_base = _strides(form), int(form.storage_offset()), spot.of_base or spot
        return put(leaf, shown)

    return pytree.tree_map_only(torch.Tensor, shows, found)


def _strides(tensor: torch.Tensor) -> Any:
    return None if tensor.is_contiguous() else tensor.stride()


def _image(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the device meta that lies in its memory as it does on its rank."""
    spot = spot_of(tensor)
    strides = torch.empty(tensor.shape, device="meta").stride() if spot.strides is None else spot.strides
    if not spot.offset:
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    end = spot.offset + sum(max(0, size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)) + 1
    return torch.empty(end, dtype=tensor.dtype, device="meta").as_strided(tensor.shape, strides, spot.offset)


def shown_by_view(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]] | None:
    """The tensor whose memory a view shows, and its size, strides and offset there. None: it is no view, or that tensor
    was given other memory since. The same on all ranks; the cell may have ended."""
    spot = spot_of(tensor)
    if spot.base is None or spot.of_base is None or spot.memory is not spot.of_base.memory:
        return None
    with tensors.as_plain_tensors():
        image = _image(tensor)
        return spot.base, (tuple(image.shape), image.stride(), image.storage_offset())


def _one_number(form: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return stand_in(torch.empty((), dtype=form.dtype, device=of.device).expand(form.shape))


def _each(name: str, args: Any, kwargs: Any) -> Any:
    """`torch._foreach_mul_(tensors, …)`, as averages of weights and clipping use it: one after the other."""
    function = getattr(torch.Tensor, name.removeprefix(tensors.OF_EACH), None)
    if function is None:
        raise unknown_of(name, pytree.tree_leaves(args))
    count = len(args[0])
    columns = [arg if isinstance(arg, list | tuple) and len(arg) == count else [arg] * count for arg in args]
    returned = [
        call(function, row, kwargs) if any(map(is_stage_tensor, row)) else function(*row, **kwargs)
        for row in zip(*columns, strict=True)
    ]
    return None if name.endswith("_") else returned


def _unscale(func: Any, of: StageContext, args: Any) -> None:
    """Of a scaler: it passes a step over on every rank, or on none."""
    grads, overflow, factor = args
    func([gradient for gradient in grads if not is_stage_tensor(gradient) or spot_of(gradient).mine], overflow, factor)
    sent = overflow.to(of.device)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    overflow.copy_(sent)
