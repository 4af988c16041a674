"""Tensors that lie whole on one rank, and read and are written anywhere in a cell as if they lay on all.

Under `pipeline` a weight, its gradient and what an optimizer remembers of it are on the rank of their stage; the others
have one number in their shape. All ranks run the same cell, so whatever it does with such a tensor outside of a stage,
it does on every rank at the same place: what is read is sent by its rank to all, what is written is written where it
lies, and what is only asked for its form is answered as it is. A view (`p.data`, `p[0]`, an entry of a `state_dict()`)
lies where its tensor does, and goes on showing it.

For that the tensors have a class of their own while a cell runs, and their plain one inside of a stage, where nothing
of this is asked for.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.compat import dtensor, pytree, tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.collective_calls import ODD
from nbtrain.strategies.kit.owned_tensors import stand_in

ALONE = (
    "Under pipeline a weight, its gradient and its optimizer's state are on one rank, and reading them needs every "
    "rank: write `norm = float(p.norm())`, or `state = model.state_dict()`, on every rank, above `if rank == 0:`. "
    "Under --strategy ddp one rank can do it alone"
)
APART = (
    "the ranks read different weights, or in a different order, which under pipeline they do together: do the same on "
    "every rank, not below `if rank == 0:`; or use --strategy ddp"
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
SPARSE = (
    "a sparse gradient was read or edited, which under pipeline only the rank of its stage has: step the optimizer "
    "with it as it is, let the nn.Embedding have sparse=False, or use --strategy ddp"
)
OVER = "it lies on one rank of a cell that has ended"

SPOT = "nbtrain_spot"
"""The attribute of such a tensor that says where it lies."""
FORM = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_inference", "is_conj", "is_neg", "is_shared", "element_size", "__len__", "get_device",
    "storage_offset", "is_same_size", "is_tensor", "is_storage", "requires_grad_", "retain_grad", "register_hook",
    "register_post_accumulate_grad_hook", "__hash__", "dim_order", "has_names", "result_type", "can_cast",
    "promote_types", "__dir__", "__setstate__",
    # what a search for memory asks everything it finds: a rank that has it not tells of one number
    "data_ptr", "untyped_storage",
    "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided",
}) | tensors.ASKS_OF_FORM  # fmt: skip
"""Functions that look at no number of such a tensor."""
VIEWS = frozenset({
    "data", "detach", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "contiguous", "T",
    "mT", "H", "mH", "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "squeeze", "unsqueeze",
    "select", "narrow", "__getitem__", "diagonal", "expand", "expand_as", "broadcast_to", "chunk", "split",
    "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "real", "imag", "view_as_real",
    "view_as_complex", "unfold", "adjoint", "atleast_1d", "atleast_2d", "atleast_3d", "as_strided", "alias", "positive",
    "conj", "resolve_conj", "resolve_neg", "unsafe_chunk", "unsafe_split",
})  # fmt: skip
"""Functions that may give a view; whether they do is seen on a tensor without numbers."""
LIKE = frozenset({"view_as", "reshape_as", "expand_as"})
MOVES = frozenset({
    "to", "cpu", "cuda", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "short",
    "char", "byte", "cfloat", "cdouble", "xpu", "ipu",
})  # fmt: skip
"""Functions that give the tensor itself where it is so already."""
ADDRESSES = frozenset({"storage", "__dlpack__", "share_memory_"})
PLAIN_WRITES = frozenset({
    "add_", "sub_", "mul_", "div_", "lerp_", "copy_", "zero_", "fill_", "clamp_", "clip_", "clamp_min_", "clamp_max_",
    "neg_", "sign_", "abs_", "sqrt_", "pow_", "addcmul_", "addcdiv_", "nan_to_num_", "masked_fill_", "detach_",
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "constant_", "zeros_", "ones_",
})  # fmt: skip
"""Functions that write and draw no random number: a rank that has not the tensor need not run them."""


class StageTensors:
    """Of one component, on one rank, while a cell runs."""

    def __init__(self, rank: int, inside: Callable[[], bool], device: torch.device) -> None:
        """`inside`: what runs now is a stage of this rank's."""
        self.rank, self.inside, self.device = rank, inside, device
        self.open = False
        self._marked: list[tuple[torch.Tensor, type, type, TensorSpot]] = []
        self._own: list[tuple[torch.Tensor, type, type]] = []
        self._lifted = 0

    def on(self, owned: Iterable[tuple[torch.Tensor, int, Any]]) -> None:
        """`owned`: (tensor, the rank it lies on, its strides there where it is not contiguous)."""
        self.off()
        self.open = True
        self.learn(owned, lasting=True)

    def learn(self, owned: Iterable[tuple[torch.Tensor, int, Any]], lasting: bool = False) -> None:
        """These, too. `lasting`: a stage computes with them."""
        for tensor, owner, strides in owned:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                continue
            plain = type(tensor)
            kind = StageParameter if plain is nn.Parameter else StageTensor
            spot = TensorSpot(self, owner, strides)
            self._marked.append((tensor, plain, kind, spot))
            vars(tensor)[SPOT] = spot
            if lasting and owner == self.rank:
                self._own.append((tensor, plain, kind))
                if self._lifted:
                    continue
            tensor.__class__ = kind

    def off(self) -> None:
        """Not collective. Views and copies of the cell's keep their class: they come home by their own way."""
        self.open = False
        self._lifted = 0
        for tensor, plain, _, spot in self._marked:
            if vars(tensor).get(SPOT) is spot:
                del vars(tensor)[SPOT]
                tensor.__class__ = plain
        self._marked, self._own = [], []

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Everything is, also what is another rank's: tensors without numbers are made of them, which takes no class of
        ours."""
        for tensor, plain, _, _ in self._marked:
            tensor.__class__ = plain
        try:
            yield
        finally:
            lifted = {id(tensor) for tensor, _, _ in self._own} if self._lifted else set()
            for tensor, _, kind, _ in self._marked if self.open else ():
                if id(tensor) not in lifted:
                    tensor.__class__ = kind

    @contextmanager
    def lifted(self, more: Callable[[], list[torch.Tensor]] | None = None) -> Iterator[None]:
        """What is this rank's is plain meanwhile. `more`: gradients and states, besides."""
        also = [(t, torch.Tensor, type(t)) for t in more() if is_placed(t)] if more is not None else []
        self._lifted += 1
        if self._lifted == 1:
            for tensor, plain, _ in self._own:
                tensor.__class__ = plain
        for tensor, plain, _ in also:
            tensor.__class__ = plain
        try:
            yield
        finally:
            self._lifted -= 1
            if not self._lifted:
                for tensor, _, kind in self._own if self.open else ():
                    tensor.__class__ = kind
            for tensor, _, kind in also if self.open else ():
                tensor.__class__ = kind


class TensorSpot:
    """Where a tensor lies."""

    __slots__ = ("owner", "placing", "sparse", "strides")

    def __init__(self, placing: StageTensors, owner: int, strides: Any = None) -> None:
        self.placing, self.owner, self.strides = placing, owner, strides
        self.sparse = False

    @property
    def mine(self) -> bool:
        return self.owner == self.placing.rank

    def like(self, strides: Any = None) -> TensorSpot:
        return TensorSpot(self.placing, self.owner, strides)


def is_placed(tensor: Any) -> bool:
    return type(tensor) in (StageTensor, StageParameter)


def spot_of(tensor: torch.Tensor) -> TensorSpot:
    found: TensorSpot = vars(tensor)[SPOT]
    return found


def put(tensor: torch.Tensor, spot: TensorSpot) -> torch.Tensor:
    """It lies there from now on."""
    tensor.__class__ = StageTensor
    vars(tensor)[SPOT] = spot
    return tensor


def gradient_elsewhere(p: torch.Tensor, placing: StageTensors, owner: int, sparse: bool = False) -> torch.Tensor:
    """In the place of `p.grad`, which is on another rank."""
    found = put(stand_in(p.detach()), TensorSpot(placing, owner))
    spot_of(found).sparse = sparse
    # What code sees that looks for numbers which are not finite, in the part of a gradient that a rank has.
    dtensor.pose_with_local(found, torch.zeros(1, dtype=p.dtype, device=p.device))
    return found


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with tensors.as_plain_tensors():
        return _answer(func, args, kwargs or {})


class _Placed:
    """What a tensor on one rank does otherwise than any other."""

    __torch_function__ = classmethod(_torch_function)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with tensors.as_plain_tensors():
                copied = _whole(self).detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            elif self.requires_grad and self.is_leaf:
                copied.requires_grad_()
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self: Any, version: Any) -> Any:
        if not spot_of(self).placing.open:
            raise NotSupported(OVER)
        return copy.deepcopy(self).__reduce_ex__(version)

    def __str__(self: Any) -> str:
        with tensors.as_plain_tensors():
            return str(_plain_of(_whole(self)))

    def __repr__(self: Any, **_: Any) -> str:
        """Tracebacks and debuggers call it on one rank."""
        where = "this rank" if spot_of(self).mine else f"rank {spot_of(self).owner}"
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"<{kind} of the shape {tuple(self.shape)} on {where}: print(...) shows it>"

    def _repr_pretty_(self: Any, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __iter__(self: Any) -> Iterator[Any]:
        return iter(self.unbind(0))


class StageTensor(_Placed, torch.Tensor):  # type: ignore[misc]
    """A tensor on one rank."""


class StageParameter(_Placed, nn.Parameter):  # type: ignore[misc]
    """A parameter on one rank."""


def gathered(value: Any) -> Any:
    """What a cell is about to save, with whole tensors in the places of those on one rank; the value itself if it has
    none. Collective."""
    if not any(map(is_placed, pytree.tree_leaves(value))):
        return value
    with tensors.as_plain_tensors():
        whole: dict[int, torch.Tensor] = {}

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            if not is_placed(tensor):
                return tensor
            if id(tensor) not in whole:
                whole[id(tensor)] = _plain_of(_whole(tensor)).detach()
            return whole[id(tensor)]

        return pytree.tree_map_only(torch.Tensor, taken, value)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor that every rank has. Collective; the cell may have ended."""
    with tensors.as_plain_tensors():
        return _plain_of(_sent(tensor, spot_of(tensor))).detach().clone()


# --- what is asked ---------------------------------------------------------------------------------


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(name, getattr(getattr(func, "__self__", None), "__name__", ""), func, args)
    held = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_placed(leaf)]
    # Operators come from below autograd, where what a cell asked for has been answered already.
    if name in FORM or type(func).__name__ == "OpOverload" or not any(spot_of(one).placing.open for one in held):
        return func(*args, **kwargs)
    foreign = next((one for one in held if not spot_of(one).mine), None)
    if any(spot_of(one).placing.inside() for one in held):
        if foreign is not None:
            raise NotSupported(INSIDE.format(shape=tuple(foreign.shape)))
        return func(*args, **kwargs)
    if name in ADDRESSES:
        raise NotSupported(MEMORY.format(name=name))
    if name.startswith("_") and not name.startswith("__") and args and isinstance(args[0], (list, tuple)):
        if name.endswith("_"):
            return _write_many(func, name, args, kwargs)
    elif "out" in kwargs:
        write = is_placed(kwargs["out"])
        return _write(func, name, args, kwargs, kwargs["out"]) if write else _read(func, args, kwargs)
    elif _edits(name):
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if is_placed(target):
            return _write(func, name, args, kwargs, target)
    elif (name in VIEWS or name in MOVES) and args and is_placed(args[0]):
        return _view(func, name, args, kwargs)
    return _read(func, args, kwargs)


def _attribute(kind: str, name: str, func: Any, args: Any) -> Any:
    tensor = args[0]
    spot = spot_of(tensor)
    if kind == "__get__":
        if name == "grad":
            return _gradient(tensor, spot)
        if name in VIEWS and spot.placing.open and not (spot.mine and spot.placing.inside()):
            return _view(func, name, args, {})
        return func(*args)
    if kind == "__set__" and name in ("data", "grad") and args[1] is not None and spot.placing.open:
        value = args[1]
        if is_placed(value) and spot_of(value).owner != spot.owner:
            value = _whole(value).detach()
        if name == "data":
            spot.strides = None if is_placed(value) or value.is_contiguous() else value.stride()
            if is_placed(value):
                spot.strides = spot_of(value).strides
            return func(tensor, value if spot.mine else stand_in(value.detach()))
        if spot.mine:
            return func(tensor, value)
        there = gradient_elsewhere(value, spot.placing, spot.owner)
        return func(tensor, there)
    return func(*args)


def _gradient(tensor: torch.Tensor, spot: TensorSpot) -> torch.Tensor | None:
    grad = tensor.grad
    if grad is not None and type(grad) is torch.Tensor and spot.mine and spot.placing.open:
        sparse = grad.is_sparse
        local = grad.detach()
        put(grad, spot.like(None if sparse or grad.is_contiguous() else grad.stride()))
        spot_of(grad).sparse = sparse
        dtensor.pose_with_local(grad, local)
    return grad


# --- reading ---------------------------------------------------------------------------------------


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """With whole tensors, on every rank. Who has a tensor reads it as it is, so that a gradient finds it there."""
    whole: dict[int, torch.Tensor] = {}
    back: dict[int, torch.Tensor] = {}

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if not is_placed(tensor):
            return tensor
        if id(tensor) not in whole:
            whole[id(tensor)] = found = _whole(tensor)
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


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Collective."""
    spot = spot_of(tensor)
    if spot.sparse:
        raise NotSupported(SPARSE)
    found = _sent(tensor, spot)
    if not spot.mine and tensor.requires_grad and torch.is_grad_enabled():
        found = _Away.apply(torch.zeros((), requires_grad=True), found)
    return found


@torch.no_grad()
def _sent(tensor: torch.Tensor, spot: TensorSpot) -> torch.Tensor:
    """From its rank to all."""
    number = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype, spot.owner)).encode())
    # Numbers to meet by: a rank that waits elsewhere knows from how many they are what this one is doing.
    both = torch.tensor([number, -number, *[0] * (ODD - 2)], device=spot.placing.device)
    try:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if int(both[0]) != -int(both[1]):
            raise NotSupported(APART)
        if not spot.mine:
            found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            wire = found
        else:
            found, wire = tensor, tensor.detach().resolve_conj().resolve_neg().contiguous()
        if wire.numel():
            flat = wire.reshape(-1).view(torch.uint8)
            there = flat.to(spot.placing.device)
            dist.broadcast(there, spot.owner)
            if there is not flat and not spot.mine:
                flat.copy_(there)
        if not spot.mine and spot.strides is not None and all(spot.strides) and len(spot.strides) == tensor.dim():
            # Laid out as on its rank: what is computed of it is to be the same on all, to the last bit.
            found = torch.empty_strided(found.shape, spot.strides, dtype=found.dtype, device=found.device).copy_(found)
    except NotSupported as error:
        if str(error) == APART:
            raise
        raise NotSupported(f"{error}. {ALONE}") from None
    return found


class _Away(torch.autograd.Function):
    """The numbers of a tensor that another rank has: its gradient is left there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None


def _plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, of the ordinary class."""
    return tensor.detach() if is_placed(tensor) else tensor


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
    given = pytree.tree_map_only(torch.Tensor, lambda t: _image(t) if is_placed(t) else t.to("meta"), rest)
    try:
        shown = func(form, *given, **kwargs)
    except Exception:
        return _read(func, args, kwargs)  # it says so itself, of the whole
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
    """As it lies on its rank, without numbers."""
    strides = spot_of(tensor).strides
    if strides is None or len(strides) != tensor.dim():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def _like(form: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=form.dtype, device=tensor.device).expand(form.shape)


# --- writing ---------------------------------------------------------------------------------------


def _edits(name: str) -> bool:
    """The names of functions that change their first argument: `add_`, `__iadd__`, `__setitem__`."""
    if name.startswith("__"):
        reads = ("__index__", "__invert__", "__int__", "__iter__")
        return name == "__setitem__" or (name.startswith("__i") and name not in reads)
    return name.endswith("_")


def _write(func: Any, name: str, args: Any, kwargs: Any, target: torch.Tensor) -> Any:
    """Where it lies. Random numbers are drawn on every rank, or their streams would part."""
    spot = spot_of(target)
    if spot.sparse:
        if spot.mine or name not in ("zero_", "mul_", "div_", "__imul__"):
            raise NotSupported(SPARSE)
        return target
    if name == "detach_":
        return func(*args, **kwargs)

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not target and is_placed(tensor) and spot_of(tensor).owner != spot.owner:
            return _whole(tensor)
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
        torch.Tensor, lambda t: there if t is target else (_blank(t) if is_placed(t) else t), (args, kwargs)
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
    placing = next(spot_of(t).placing for t in pytree.tree_leaves(args) if is_placed(t))
    for i, target in enumerate(targets):
        spot = spot_of(target) if is_placed(target) else None
        for column in lists[1:]:
            one: Any = column[i] if isinstance(column, list) and len(column) == len(targets) else None
            if is_placed(one) and (spot is None or spot_of(one).owner != spot.owner):
                column[i] = _whole(one)
        if spot is None or spot.mine:
            kept.append(i)
    chosen = [
        [column[i] for i in kept] if isinstance(column, list) and len(column) == len(targets) else column
        for column in lists
    ]
    returned = func(*chosen, **kwargs) if kept else None
    if "non_finite" in name:  # a scaler passes a step over on every rank, or on none
        found = args[1].to(placing.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        args[1].copy_(found)
    return returned
