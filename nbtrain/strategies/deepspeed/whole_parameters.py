"""Stage 3: a parameter that is read or written in a cell outside of the model's forward means the whole.

While a cell runs, and neither a backward nor a step is under way, parameters have a class of their own by
which torch asks here first. What an operation reads is gathered for that one operation; what it has written to is cut
up again, into the pieces that are stepped as well as those that the model computes with. A gradient goes through what
was gathered to the parameter, so that a penalty in the loss is one. All ranks have to come, as to any collective. A
function with a backward of its own (`MyFunction.apply(p)`) is no operation that torch asks about: we ask in its place.

In the model's own methods and forwards, too: DeepSpeed gathers for each layer what that layer has, and that is used as
it is; of anything else, and of what is written, the above holds (`model.scale_(2)`, a penalty that a method returns).

What shows a part of a parameter (`p.data`, `p[0]`, `p.flatten()`) goes on doing so: it is found anew in the whole each
time that it is used. When the cell ends it is a tensor of its own, with the numbers that it was last read with.

When that is so, and how a whole is had and written, is in parameter_access.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import deepspeed as ds
from nbtrain.compat import tensors
from nbtrain.compat.autograd_engine import in_backward, is_followed
from nbtrain.compat.intercept import original
from nbtrain.compat.internals import find
from nbtrain.compat.pytree import tree_leaves, tree_map_only
from nbtrain.strategies.deepspeed.stand_ins import MOVED, READ
from nbtrain.strategies.kit import functional_transforms, shown_weights
from nbtrain.strategies.kit.known_functions import NORMS, known, written
from nbtrain.strategies.kit.named_tensors import no_node, unknown
from nbtrain.strategies.kit.owned_tensors import ANSWERED, OF_LAYOUT, StandIn, ordinary
from nbtrain.strategies.kit.random_draws import shared_random_state

if TYPE_CHECKING:
    from weakref import WeakSet

    from nbtrain.strategies.deepspeed.weights import EngineWeights

OF_ITSELF = ANSWERED | {
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad=", "grad~",
    "requires_grad=", "__setstate__", tensors.ACCUMULATED_HOOKS, f"{tensors.GRADIENT_HOOKS}=",
}  # fmt: skip
"""functions of a parameter that say or change nothing of its numbers"""
OF_SEEN = OF_LAYOUT | {"requires_grad"}
"""what a view answers as the tensor that was last read"""
PLAIN_CALLERS = ("deepspeed.", "nbtrain.strategies.deepspeed.")
"""modules that mean the tensor as it is"""
LEAF = "a leaf Variable that requires grad is being used in an in-place operation."
LEAF_OF_VIEW = (
    "requires_grad_() of a tensor that shows a weight (p.detach(), p.data): under deepspeed stage 3 it has no memory "
    "of its own, and no gradient would come to it: write `w = p.detach().clone().requires_grad_()`"
)
DATA_OF_VIEW = (
    "`w.data = tensor` of a tensor that shows a weight (p.detach(), p.data): under deepspeed stage 3 it has no memory "
    "of its own. Write to it (`w.copy_(tensor)`), or bind the name anew (`w = tensor`)"
)
PARTS = "of which each rank has a part under deepspeed stage 3"


class Access(Protocol):
    """How the parameters of one engine are had: `parameter_access.ParameterAccess`."""

    weights: EngineWeights
    views: WeakSet[WholeView]
    opens: Callable[[], None]

    def gather(self, p: torch.Tensor) -> torch.Tensor: ...

    def write(self, p: Any, full: torch.Tensor) -> None: ...


in_methods: list[Access] = []
"""of engines in which a method of a model's runs"""
MAKES_LEAVES = torch.Tensor.requires_grad_, cast(Any, torch.Tensor.requires_grad).__set__
readers: dict[int, Access] = {}
"""by id of the parameter, while a cell runs"""


class _GatheredParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, reader: Access) -> torch.Tensor:
        ctx.reader = reader
        return reader.gather(p).clone()  # neither the parameter's own memory nor a view, which torch has not written to

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.reader.opens()
        return grads[0], None


class WholeParameter(nn.Parameter):
    """What a parameter is in a cell, outside of its engine's work."""

    nbtrain_drawn_as_a_weight = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # No name for a frame: it would hold itself, and all that its callers have. CPython has frames.
        caller = inspect.currentframe().f_back.f_globals.get("__name__", "")  # type: ignore[union-attr]
        if in_backward() or caller.startswith(PLAIN_CALLERS):
            with tensors.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if caller == "torch.autograd.functional":  # what it makes of a weight are leaves, which show nothing
            return _complete(func, args, kwargs or {})
        if func in MAKES_LEAVES and _makes_leaf(args, kwargs) and not caller.startswith("torch."):
            raise NotSupported(LEAF_OF_VIEW)
        if not in_methods or (there := _gathered(func, args, kwargs)) is None:
            return _call(func, args, kwargs or {})
        with tensors.as_plain_tensors():
            versions = [tensors.version(p) for p in there]
            result = func(*args, **(kwargs or {}))
            for p, version in zip(there, versions, strict=True):
                if tensors.version(p) != version:
                    readers[id(p)].write(p, p)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = _copied(self)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copied(self).__reduce_ex__(protocol)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """It asks no `__torch_function__`. A parametrization that is put on or taken off calls it."""
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            raise unknown("set_", self, PARTS)
        if args[0] is not self:
            with tensors.as_plain_tensors():
                _assign(self, args[0])
        return self


class WholeView(torch.Tensor):
    """Shows what `expression` makes of the whole."""

    nbtrain_drawn_as_a_weight = True
    expression: tuple[Any, Any, Any, int | None]
    seen: torch.Tensor
    """as it was last read"""

    @classmethod
    def of(cls, expression: tuple[Any, Any, Any, int | None], seen: torch.Tensor) -> WholeView:
        form = torch.zeros((), dtype=seen.dtype, device=seen.device).expand(seen.shape)
        view: WholeView = tensors.as_subclass_of(cls, form)
        view.expression, view.seen = expression, seen
        return view

    __torch_function__ = WholeParameter.__dict__["__torch_function__"]

    def nbtrain_shown(self) -> list[Any]:
        """The parameters that it shows."""
        leaves = tree_leaves(self.expression[1:3])
        parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        return [*parameters, *(p for leaf in leaves if isinstance(leaf, WholeView) for p in leaf.nbtrain_shown())]

    def shows(self, p: Any) -> bool:
        return any(shown is p for shown in self.nbtrain_shown())

    def place(self) -> tuple[torch.Tensor, shown_weights.Form] | None:
        """The parameter of which it shows a part, and size, strides and offset of that; tried on the device meta."""
        p, *others = self.nbtrain_shown() or [None]
        if p is None or any(other is not p for other in others):
            return None
        whole = torch.empty(p.shape, dtype=p.dtype, device="meta")

        def image(value: Any) -> torch.Tensor:
            if not isinstance(value, WholeView):
                return whole
            func, args, kwargs, index = value.expression
            args, kwargs = tree_map_only((nn.Parameter, WholeView), image, (args, kwargs))
            result = func(*args, **kwargs)
            found: torch.Tensor = result if index is None else result[index]
            return found

        with tensors.as_plain_tensors(), torch.no_grad():
            part = image(self)
            form = tuple(part.shape), part.stride(), int(part.storage_offset())
        return (p, form) if _memory(part) == _memory(whole) else None

    def settle(self, alone: bool = True) -> None:
        """An ordinary tensor from now on; `alone`: with memory of its own."""
        self.__class__ = torch.Tensor  # type: ignore[assignment]  # it becomes another class
        attributes: dict[str, Any] = vars(self)
        seen = attributes.pop("seen")
        attributes.pop("expression")
        self.data = seen.detach().clone() if alone else seen.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)

    @torch.no_grad()
    def _copied(self) -> torch.Tensor:
        with tensors.as_plain_tensors():
            copied: torch.Tensor = _GatheredOperands().plain(self).clone()
        return copied


def _copied(p: torch.Tensor) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(readers[id(p)].gather(p).clone(), p.requires_grad)


def _makes_leaf(args: Any, kwargs: Any) -> bool:
    return isinstance(args[0], WholeView) and bool([*args[1:], (kwargs or {}).get("requires_grad", True)][0])


def _gathered(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """The parameters of a call, if it is one of a model's forward and DeepSpeed has gathered all of them."""
    leaves = tree_leaves((args, kwargs))
    there: list[torch.Tensor] = [leaf for leaf in leaves if isinstance(leaf, WholeParameter | WholeView)]
    for p in there:
        reader = readers.get(id(p))
        if reader not in in_methods or not reader.weights.is_gathered(p):
            return None
    return None if _name(func) in ("data", "data=") else there  # what is written to it is to be seen


def _memory(tensor: torch.Tensor) -> int:
    return tensors.memory_id(tensor.untyped_storage())


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    ends = {"__get__": "", "__set__": "=", "__delete__": "~"}
    if name not in ends:
        return str(name)
    return f"{getattr(func.__self__, '__name__', '')}{ends[name]}"


class _GatheredOperands:
    """The gathered parameters that one operation works on."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Any, torch.Tensor, int]] = {}
        """by id of the parameter: it, its whole, and the version of that"""
        self.made: dict[int, tuple[Any, torch.Tensor]] = {}
        """by id of a parameter or view: it, and what stood for it"""

    def plain(self, value: Any) -> Any:
        if (known := self.made.get(id(value))) is not None:
            return known[1]
        if isinstance(value, WholeView):
            func, args, kwargs, index = value.expression
            args, kwargs = tree_map_only((WholeParameter, WholeView), self.plain, (args, kwargs))
            result = func(*args, **kwargs)
            plain: torch.Tensor = result if index is None else result[index]
            value.seen = plain
        else:
            reader = readers.get(id(value))
            if reader is None:  # of a cell that is over
                return value
            if torch.is_grad_enabled() and value.requires_grad:
                plain = _GatheredParameter.apply(value, reader)
            else:
                plain = reader.gather(value)
            self.found[id(value)] = value, plain, tensors.version(plain)
        self.made[id(value)] = value, plain
        return plain

    def write(self, targets: Iterable[Any], also: Set[int] = frozenset()) -> None:
        """What the operation has written to, as versions tell, but of that which writes to many at once: `also` has
        the ids of those. `targets`: what it is meant to write to, which autograd must not follow."""
        leaves = set(map(id, targets))
        for p, full, version in self.found.values():
            if tensors.version(full) == version and id(p) not in also:
                continue
            if full.requires_grad and id(p) in leaves:
                raise RuntimeError(LEAF)
            readers[id(p)].write(p, full)

    def shown(self, result: Any, expression: tuple[Any, Any, Any], index: int | None = None) -> Any:
        """The result, with what shows a part of a whole in the place of what is one."""
        if isinstance(result, tuple | list) and index is None:
            shown = [self.shown(part, expression, i) for i, part in enumerate(result)]
            changed = any(part is not other for part, other in zip(shown, result, strict=True))
            return type(result)(shown) if changed and type(result) in (tuple, list) else result
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
            return result
        for value, plain in self.made.values():
            if plain is result:
                return value
        memory = _memory(result)
        for p, full, _ in self.found.values():
            if _memory(full) == memory:
                view = WholeView.of((*expression, index), result)
                readers[id(p)].views.add(view)
                return view
        return result


def applied(old: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.Function.apply`: what is differentiated is what it is given, so that is gathered. What its code
    reads besides goes the way of any operation."""

    shown = (WholeParameter, WholeView)
    linear = find(ds.LINEAR_FUNCTION)

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is _GatheredParameter or (in_methods and _gathered(function, args, kwargs)):
            return old(function, *args, **kwargs)
        for operand in (*args, *kwargs.values()) if kwargs else args:  # no generator: DeepSpeed's own come here, too
            if isinstance(operand, shown):
                break
        else:
            try:
                return old(function, *args, **kwargs)
            except RuntimeError:
                if function is not linear or not is_followed():
                    raise
                return original("torch.nn.functional.linear")(*args)  # inside of torch.func torch's own is known
        if function is linear and is_followed():
            return _call(original("torch.nn.functional.linear"), args, kwargs)
        operands = _GatheredOperands()
        with tensors.as_plain_tensors():
            own = tuple(operands.plain(operand) if isinstance(operand, shown) else operand for operand in args)
            named = {
                name: operands.plain(operand) if isinstance(operand, shown) else operand
                for name, operand in kwargs.items()
            }
        result = old(function, *own, **named)
        with tensors.as_plain_tensors():
            operands.write(args)
            return operands.shown(result, (partial(old, function), args, kwargs))

    return apply


def _call(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    name = _name(func)
    with tensors.as_plain_tensors():
        if name == "grad_fn" and isinstance(args[0], WholeView) and args[0].seen.requires_grad:
            raise no_node(args[0].nbtrain_shown()[0], PARTS)
        if name in OF_ITSELF and not (name in OF_SEEN and isinstance(args[0], WholeView)):
            return func(ordinary(args[0]), *args[1:], **kwargs) if name in OF_LAYOUT else func(*args, **kwargs)
        if name in OF_SEEN:
            return func(args[0].seen, *args[1:], **kwargs)
    if functional_transforms.meets(name):
        return functional_transforms.call(func, args, kwargs)
    with tensors.as_plain_tensors():
        if name == "data=" and isinstance(args[0], WholeView):
            raise NotSupported(DATA_OF_VIEW)
        if name == "data=" and isinstance(args[0], WholeParameter):
            return _assign(args[0], args[1])
        if name == "data":  # as `detach`, but that what is written to it is seen
            func = torch.Tensor.detach
        operands = _GatheredOperands()
        what = known(func)
        targets = written(what, args, kwargs, (WholeParameter, WholeView))
        if targets and what.written and not what.in_form:
            shown = targets[0].nbtrain_shown() if isinstance(targets[0], WholeView) else targets
            raise unknown(name, shown[0], PARTS)
        if any(isinstance(leaf, StandIn) for leaf in tree_leaves((args, kwargs))):
            raise NotSupported(READ)
        if name.startswith(tensors.OF_LISTS) or name in NORMS:
            for target in targets:
                operands.plain(target)
        of_lists = set(operands.found)
        own, named = tree_map_only((WholeParameter, WholeView), operands.plain, (args, dict(kwargs)))
        with shared_random_state(named["tensor"].device) if what.starts else nullcontext():
            result = func(*own, **named)
        if name in ("numpy", "__array__"):  # what is written into it would be lost
            result.flags.writeable = False
        operands.write(() if what.starts else targets, of_lists)  # torch.nn.init writes without a graph
        return operands.shown(result, (func, args, dict(kwargs)))


def _complete(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    with tensors.as_plain_tensors():
        given, named = tree_map_only((WholeParameter, WholeView), _GatheredOperands().plain, (args, dict(kwargs)))
        return func(*given, **named)


def _assign(p: Any, value: torch.Tensor) -> None:
    if isinstance(value, WholeParameter | WholeView):
        value = _GatheredOperands().plain(value)
    if value.shape != p.shape:
        raise NotSupported(
            f"p.data = … of another shape ({tuple(value.shape)} for {tuple(p.shape)}): under deepspeed a parameter "
            "keeps its shape in a cell; change the model in a cell that is not distributed"
        )
    if value.dtype != p.dtype:
        raise NotSupported(MOVED)
    with torch.no_grad():
        value = value.detach().to(p.device, copy=True)
        _leave(p)
        readers[id(p)].write(p, value)


def _leave(p: Any) -> None:
    """It is about to have other memory: what shows the memory that it has keeps that. All ranks gather it, whoever of
    them still holds such a view."""
    reader, operands = readers[id(p)], _GatheredOperands()
    full = reader.gather(p).clone()
    operands.found[id(p)] = p, full, tensors.version(full)
    operands.made[id(p)] = p, full
    for view in [other for other in reader.views if isinstance(other, WholeView) and other.shows(p)]:
        operands.plain(view)
        view.settle(alone=False)
    for tensor, _ in reader.weights.shown_copies.pop(id(p), (p, []))[1]:
        shown_weights.forget(tensor)
