"""pipeline: what a function does when a cell calls it with a tensor that lies on one rank, outside of a stage.

It is asked for its form only, reads, gives a view, or writes; by its name it is known which.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import dtensor, pytree, tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.owned_tensors import stand_in
from nbtrain.strategies.kit.tensor_spots import (
    SPARSE,
    TensorSpot,
    full_tensor,
    gradient_elsewhere,
    is_stage_tensor,
    put,
    spot_of,
)

INSIDE = (
    "a forward, or a hook on a module, reads a weight or gradient of another stage ({shape}), and under pipeline a "
    "stage computes on its rank alone: read it in the loop, before or after the model is called, or use --strategy ddp"
)
MEMORY = (
    "{name}() was asked of a weight, a gradient or an optimizer's state, which under pipeline lies on one rank, so "
    "that the others have no memory of it: write {{n: p.clone() for n, p in model.named_parameters()}} for copies that "
    "every rank has, or use --strategy ddp"
)

FORM = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_inference", "is_conj", "is_neg", "is_shared", "element_size", "__len__", "get_device",
    "storage_offset", "is_same_size", "is_tensor", "is_storage", "requires_grad_", "retain_grad", "register_hook",
    "register_post_accumulate_grad_hook", "__hash__", "dim_order", "has_names", "result_type", "can_cast",
    "promote_types", "__dir__", "__setstate__",
    # what a search for memory asks everything it finds: a rank without the content answers with one number
    "data_ptr", "untyped_storage",
    "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided",
}) | tensors.ASKS_OF_FORM  # fmt: skip
"""Functions that do not read the content of such a tensor."""
VIEWS = frozenset({
    "data", "detach", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "contiguous", "T",
    "mT", "H", "mH", "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "squeeze", "unsqueeze",
    "select", "narrow", "__getitem__", "diagonal", "expand", "expand_as", "broadcast_to", "chunk", "split",
    "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "real", "imag", "view_as_real",
    "view_as_complex", "unfold", "adjoint", "atleast_1d", "atleast_2d", "atleast_3d", "as_strided", "alias", "positive",
    "conj", "resolve_conj", "resolve_neg", "unsafe_chunk", "unsafe_split",
})  # fmt: skip
"""Functions that may return a view; whether they do is tried on the device meta."""
LIKE = frozenset({"view_as", "reshape_as", "expand_as"})
MOVES = frozenset({
    "to", "cpu", "cuda", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "short",
    "char", "byte", "cfloat", "cdouble", "xpu", "ipu",
})  # fmt: skip
"""Functions that return the tensor itself where there is nothing to do."""
ADDRESSES = frozenset({"storage", "__dlpack__", "share_memory_"})
PLAIN_WRITES = frozenset({
    "add_", "sub_", "mul_", "div_", "lerp_", "copy_", "zero_", "fill_", "clamp_", "clip_", "clamp_min_", "clamp_max_",
    "neg_", "sign_", "abs_", "sqrt_", "pow_", "addcmul_", "addcdiv_", "nan_to_num_", "masked_fill_", "detach_",
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "constant_", "zeros_", "ones_",
})  # fmt: skip
"""Functions that write and draw no random number: a rank without the tensor need not run them."""


def call(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(name, getattr(getattr(func, "__self__", None), "__name__", ""), func, args)
    held = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_stage_tensor(leaf)]
    # Operators come from below autograd, where what a cell asked for has been answered already.
    if name in FORM or type(func).__name__ == "OpOverload" or not any(spot_of(one).context.open for one in held):
        return func(*args, **kwargs)
    foreign = next((one for one in held if not spot_of(one).mine), None)
    if any(spot_of(one).context.inside() for one in held):
        if foreign is not None:
            raise NotSupported(INSIDE.format(shape=tuple(foreign.shape)))
        return func(*args, **kwargs)
    if name in ADDRESSES:
        raise NotSupported(MEMORY.format(name=name))
    if name.startswith("_") and not name.startswith("__") and args and isinstance(args[0], (list, tuple)):
        if name.endswith("_"):
            return _write_many(func, name, args, kwargs)
    elif "out" in kwargs:
        write = is_stage_tensor(kwargs["out"])
        return _write(func, name, args, kwargs, kwargs["out"]) if write else _read(func, args, kwargs)
    elif _edits(name):
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if is_stage_tensor(target):
            return _write(func, name, args, kwargs, target)
    elif (name in VIEWS or name in MOVES) and args and is_stage_tensor(args[0]):
        return _view(func, name, args, kwargs)
    return _read(func, args, kwargs)


def _attribute(kind: str, name: str, func: Any, args: Any) -> Any:
    tensor = args[0]
    spot = spot_of(tensor)
    if kind == "__get__":
        if name == "grad":
            return _gradient(tensor, spot)
        if name in VIEWS and spot.context.open and not (spot.mine and spot.context.inside()):
            return _view(func, name, args, {})
        return func(*args)
    if kind == "__set__" and name in ("data", "grad") and args[1] is not None and spot.context.open:
        value = args[1]
        if is_stage_tensor(value) and spot_of(value).owner != spot.owner:
            value = full_tensor(value).detach()
        if name == "data":
            spot.strides = None if is_stage_tensor(value) or value.is_contiguous() else value.stride()
            if is_stage_tensor(value):
                spot.strides = spot_of(value).strides
            return func(tensor, value if spot.mine else stand_in(value.detach()))
        if spot.mine:
            return func(tensor, value)
        there = gradient_elsewhere(value, spot.context, spot.owner)
        return func(tensor, there)
    return func(*args)


def _gradient(tensor: torch.Tensor, spot: TensorSpot) -> torch.Tensor | None:
    grad = tensor.grad
    if grad is not None and type(grad) is torch.Tensor and spot.mine and spot.context.open:
        sparse = grad.is_sparse
        local = grad.detach()
        strides = None if sparse or grad.is_contiguous() else grad.stride()
        put(grad, TensorSpot(spot.context, spot.owner, strides, sparse))
        dtensor.pose_with_local(grad, local)
    return grad


# --- reading ---------------------------------------------------------------------------------------


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """Call it with full tensors, on every rank. The owner reads its own tensor, so that a gradient finds it there."""
    whole: dict[int, torch.Tensor] = {}
    back: dict[int, torch.Tensor] = {}

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if not is_stage_tensor(tensor):
            return tensor
        if id(tensor) not in whole:
            whole[id(tensor)] = found = full_tensor(tensor)
            back[id(found)] = tensor
        return whole[id(tensor)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, taken, (args, kwargs))
    returned = func(*args, **kwargs)
    if getattr(func, "__name__", "") in ("numpy", "__array__"):  # others would not see what one writes into it
        returned = returned.copy()
        returned.flags.writeable = False
        return returned
    if isinstance(returned, torch.Tensor):
        return back.get(id(returned), returned)
    return returned


def _view(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    tensor, rest = args[0], args[1:]
    spot = spot_of(tensor)
    others = [leaf for leaf in pytree.tree_leaves((rest, kwargs)) if isinstance(leaf, torch.Tensor)]
    if spot.sparse or (others and name not in LIKE and name not in MOVES):
        return _read(func, args, kwargs)
    if name in MOVES:
        like = stand_in(tensor.detach())
        with torch.no_grad():
            return tensor if func(like, *rest, **kwargs) is like else _read(func, args, kwargs)
    form = _image(tensor)
    given = pytree.tree_map_only(torch.Tensor, lambda t: _image(t) if is_stage_tensor(t) else t.to("meta"), rest)
    try:
        shown = func(form, *given, **kwargs)
    except Exception:  # it says so itself, of the whole
        return _read(func, args, kwargs)
    forms = [leaf for leaf in pytree.tree_leaves(shown) if isinstance(leaf, torch.Tensor)]
    if name not in ("data", "detach") and not all(one is form or tensors.is_view(one) for one in forms):
        return _read(func, args, kwargs)
    if len(forms) == 1 and forms[0] is form:
        return tensor
    try:
        found = func(tensor, *rest, **kwargs)
    except RuntimeError:
        if spot.mine:
            raise
        with torch.no_grad():  # one number has no such view
            found = pytree.tree_map_only(torch.Tensor, lambda t: stand_in(_like(t, tensor)), shown)
    leaves = iter(forms)

    def placed(leaf: torch.Tensor) -> torch.Tensor:
        one = next(leaves)
        return put(leaf, spot.like(None if one.is_contiguous() else one.stride()))

    return pytree.tree_map_only(torch.Tensor, placed, found)


def _image(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the device meta that has its shape, and the strides that it has on its rank."""
    strides = spot_of(tensor).strides
    if strides is None or len(strides) != tensor.dim():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def _like(form: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=form.dtype, device=tensor.device).expand(form.shape)


# --- writing ---------------------------------------------------------------------------------------


def _edits(name: str) -> bool:
    """Whether a function of this name changes its first argument: `add_`, `__iadd__`, `__setitem__`."""
    if name.startswith("__"):
        reads = ("__index__", "__invert__", "__int__", "__iter__")
        return name == "__setitem__" or (name.startswith("__i") and name not in reads)
    return name.endswith("_")


def _write(func: Any, name: str, args: Any, kwargs: Any, target: torch.Tensor) -> Any:
    """Write to the tensor where it lies. Every rank draws random numbers, so that random states stay equal."""
    spot = spot_of(target)
    if spot.sparse:
        if spot.mine or name not in ("zero_", "mul_", "div_", "__imul__"):
            raise NotSupported(SPARSE)
        return target
    if name == "detach_":
        return func(*args, **kwargs)

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not target and is_stage_tensor(tensor) and spot_of(tensor).owner != spot.owner:
            return full_tensor(tensor)
        return tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, taken, (args, kwargs))
    if spot.mine:
        returned = func(*args, **kwargs)
        return None if returned is None else target
    if name in PLAIN_WRITES and not (torch.is_grad_enabled() and target.requires_grad):
        return None if name == "__setitem__" else target
    there = torch.zeros(target.shape, dtype=target.dtype, device=target.device)
    there.requires_grad_(target.requires_grad)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: there if t is target else (_blank(t) if is_stage_tensor(t) else t), (args, kwargs)
    )
    returned = func(*args, **kwargs)
    return None if returned is None else target


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _write_many(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """`torch._foreach_mul_(tensors, …)`, as averages of weights and scalers use it."""
    targets = args[0]
    lists = [list(arg) if isinstance(arg, (list, tuple)) and len(arg) == len(targets) else arg for arg in args]
    kept: list[int] = []
    context = next(spot_of(t).context for t in pytree.tree_leaves(args) if is_stage_tensor(t))
    for i, target in enumerate(targets):
        spot = spot_of(target) if is_stage_tensor(target) else None
        for column in lists[1:]:
            one: Any = column[i] if isinstance(column, list) and len(column) == len(targets) else None
            if is_stage_tensor(one) and (spot is None or spot_of(one).owner != spot.owner):
                column[i] = full_tensor(one)
        if spot is None or spot.mine:
            kept.append(i)
    chosen = [
        [column[i] for i in kept] if isinstance(column, list) and len(column) == len(targets) else column
        for column in lists
    ]
    returned = func(*chosen, **kwargs) if kept else None
    if "non_finite" in name:  # a scaler passes a step over on every rank, or on none
        found = args[1].to(context.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        args[1].copy_(found)
    return returned
