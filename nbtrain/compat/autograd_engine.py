"""torch's autograd engine: whether a backward runs, what to call when it ends, and how a loss was reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad

from nbtrain.compat.fake_tensors import FakeTensor, without_modes
from nbtrain.compat.internals import Internals, find
from nbtrain.compat.replaced_functions import FUNCTIONAL_CALL, WRAP

its = Internals("torch")

_task = its.name("torch._C._current_graph_task_id")
_keeps = its.name("torch._C._autograd._get_current_graph_task_keep_graph")
_saved_tensors_hooks = its.name("torch._C._autograd._top_saved_tensors_default_hooks")
_functorch_level = its.name("torch._C._functorch.peek_interpreter_stack")
_mode_of = its.name("torch._C._get_dispatch_mode")
_mode_keys = its.name("torch._C._TorchDispatchModeKey")
_is_wrapped = its.name("torch._C._functorch.is_functorch_wrapped_tensor")
_unwrapped = its.name("torch._C._functorch.get_unwrapped")
_is_batched = its.name("torch._C._functorch.is_batchedtensor")
its.members("torch.autograd.Variable._execution_engine", "queue_callback")
its.members("torch.autograd.Function", "_backward_cls")

MAKE_DUAL = "_make_dual"
"""What a tensor with a tangent is made by, `torch.func.jvp`'s, too."""
_OUTSIDE = "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"

its.members("torch._VF", MAKE_DUAL)
its.members("torch.autograd.forward_ad", "_current_level")
its.members(*_OUTSIDE.rsplit(".", 1))
its.takes(WRAP[0], "maybe_tensor", "level")
its.takes(WRAP[1], "self", "batch_dim", "level")
its.takes(FUNCTIONAL_CALL, "module", "parameters_and_buffers", "args", "kwargs")


def in_backward() -> bool:
    """Whether this thread runs a part of a backward; torch has no public function for that."""
    return bool(_task() != -1)


def keeps_graph() -> bool:
    """Whether the current backward was given `retain_graph=True`."""
    return bool(_keeps())


def after_backward(callback: Callable[[], Any]) -> None:
    """Call this once when the current backward has accumulated all gradients, as torch's own DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saves_by_hooks() -> bool:
    """Whether this thread is inside `torch.autograd.graph.saved_tensors_hooks`; another thread would not be."""
    return _saved_tensors_hooks(True) is not None


def in_functional_transform() -> bool:
    """Whether this runs inside `torch.func.vmap`, `grad` or the like, where a batch dimension may be hidden."""
    return _functorch_level() is not None


def is_followed() -> bool:
    """Whether torch.func, or forward mode, follows what is done here."""
    return bool(forward_ad._current_level >= 0) or in_functional_transform()


def is_traced() -> bool:
    """Whether torch notes in a graph what is done here, as `torch.func.linearize` and `make_fx` have it do."""
    return _mode_of(_mode_keys.PROXY) is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, tensors are what they are without torch.func, whatever of it has been called around."""
    context: AbstractContextManager[Any] = find(_OUTSIDE)()
    return context


def unwrapped(value: Any) -> Any:
    """The tensor inside the wrapper that `torch.func.grad` differentiates; any other value as it is."""
    while isinstance(value, torch.Tensor) and _is_wrapped(value) and not _is_batched(value):
        value = _unwrapped(value)
    return value


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values can be read."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not _is_wrapped(tensor)
    return plain and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def nodes_below(root: torch.Tensor) -> Iterator[Any]:
    """All nodes of the graph that computed `root`."""
    todo = [root.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def is_unit_gatherer(node: Any) -> bool:
    """Whether FSDP2 put this node into the graph: the weights behind it are freed after the first backward."""
    return "RegisterPostBackwardFunction" in node.name()


def is_of(function: type[torch.autograd.Function], node: Any) -> bool:
    """Whether the node is a call of this function of ours."""
    return isinstance(node, function._backward_cls)


# --- how a loss was reduced -----------------------------------------------------------------------

MEAN, SUM = 1, 2
"""the numbers that torch's loss functions save for `reduction="mean"` and `"sum"`"""
LINEAR = frozenset(f"{name}Backward0" for name in ("Add", "Sub", "Mul", "Neg", "Squeeze", "View")) | {"MulBackward1"}
"""nodes of a graph that make a sum of a sum"""
DIVISIONS = frozenset({"DivBackward0", "DivBackward1"})
"""division by a tensor, which may stand for a Python number, and by a number"""
MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
"""a mean over all dimensions, and over some"""


def node_name(node: Any) -> str:
    return str(node.name())


def was_summed(node: Any) -> bool:
    """Whether the node is a loss function of torch with `reduction="sum"`."""
    return getattr(node, "_saved_reduction", None) == SUM


def summed_shape(node: Any) -> tuple[int, ...]:
    """The shape of the tensor that `tensor.sum()` summed; empty for any other node."""
    if node_name(node) != "SumBackward0":
        return ()
    return tuple(map(int, getattr(node, "_saved_self_sym_sizes", ())))


def factors(node: Any) -> list[float]:
    """The numbers in a product of a tensor and a number; none for any other node."""
    if node_name(node) != "MulBackward0":
        return []
    saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    with without_modes():  # they may stand for Python numbers, which a mode would be given
        return [float(tensor) for tensor in saved if isinstance(tensor, torch.Tensor) and _is_number(tensor)]


def divisor(node: Any) -> float | None:
    """The number that a mean was divided by: in a loss over targets their total weight, without ignored ones; in
    `a / b` the number b."""
    name = node_name(node)
    if name.startswith("NllLoss"):
        factor = getattr(node, "_saved_total_weight", None) if node._saved_reduction == MEAN else None
    else:
        factor = getattr(node, "_saved_other", None) if name == "DivBackward0" else None
    if not isinstance(factor, torch.Tensor) or factor.dim() or factor.is_complex():
        return None
    with without_modes():  # it may stand for a Python number, which a mode would be given
        return float(factor.detach())


def averaged(node: Any) -> int | None:
    """How many elements a mean is over: `tensor.mean()`, a loss function with `reduction="mean"`, and what that divides
    by a number. A mean of losses over targets is left to `divisor`. No saved tensor is read: a checkpoint would compute
    it anew."""
    name = node_name(node)
    if name in MEANS:
        sizes, dims = _sizes(node), getattr(node, "_saved_dim", None) if name == "MeanBackward1" else None
        if sizes is None:
            return None
        return prod(sizes[_signed(dim)] for dim in dims) if dims and sizes else prod(sizes)
    if name == "DivBackward1":  # by targets that are probabilities
        other = getattr(node, "_saved_other", None)
        return other if isinstance(other, int) else None
    if name.startswith("NllLoss") or getattr(node, "_saved_reduction", None) != MEAN:
        return None
    behind, index = next(
        ((function, index) for function, index in node.next_functions if function is not None), (None, 0)
    )
    handed = getattr(behind, "_input_metadata", ())
    return prod(map(int, handed[index].shape)) if index < len(handed) else None


def is_linear(node: Any) -> bool:
    """Whether it makes a sum of a sum, and a mean of a mean: so does the mean of one number."""
    return node_name(node) in LINEAR or (node_name(node) in MEANS and _sizes(node) == ())


def _sizes(node: Any) -> tuple[int, ...] | None:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return None if sizes is None else tuple(map(int, sizes))


def _signed(number: int) -> int:
    """Torch saves -1 as 2 ** 64 - 1."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _is_number(tensor: torch.Tensor) -> bool:
    return not tensor.dim() and not tensor.requires_grad and not tensor.is_complex() and tensor.device.type == "cpu"
