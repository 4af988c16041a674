"""torch's autograd engine: whether a backward runs, what to call when it ends, and how a loss was reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nbtrain.compat.fake_tensors import FakeTensor, without_modes
from nbtrain.compat.internals import Internals

its = Internals("torch")
check = its.check

_task = its.name("torch._C._current_graph_task_id")
_keeps = its.name("torch._C._autograd._get_current_graph_task_keep_graph")
_saved_tensors_hooks = its.name("torch._C._autograd._top_saved_tensors_default_hooks")
_functorch_level = its.name("torch._C._functorch.peek_interpreter_stack")
_is_wrapped = its.name("torch._C._functorch.is_functorch_wrapped_tensor")
_unwrapped = its.name("torch._C._functorch.get_unwrapped")
_is_batched = its.name("torch._C._functorch.is_batchedtensor")
its.members("torch.autograd.Variable._execution_engine", "queue_callback")


def in_backward() -> bool:
    """Whether this thread computes a part of a backward, for which there is no public function."""
    return bool(_task() != -1)


def keeps_graph() -> bool:
    """Whether the current backward was given `retain_graph=True`."""
    return bool(_keeps())


def after_backward(callback: Callable[[], Any]) -> None:
    """Call this once when the current backward has accumulated all gradients, as torch's own DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saves_by_hooks() -> bool:
    """`torch.autograd.graph.saved_tensors_hooks` are in force in this thread; another thread would not have them."""
    return _saved_tensors_hooks(True) is not None


def in_functional_transform() -> bool:
    """Inside of `torch.func.vmap`, `grad` and the like, where a batch dimension may not be seen."""
    return _functorch_level() is not None


def unwrapped(value: Any, mapped: bool = False) -> Any:
    """Of what `torch.func.grad` differentiates, the tensor that it was given; anything else as it is. Of what `vmap`
    maps over samples it is the whole where `mapped` is set; otherwise that stays as it is."""
    while isinstance(value, torch.Tensor) and _is_wrapped(value) and (mapped or not _is_batched(value)):
        value = _unwrapped(value)
    return value


def is_plain(tensor: torch.Tensor) -> bool:
    """Its numbers can be read."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not _is_wrapped(tensor)
    return plain and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def nodes_below(root: torch.Tensor) -> Iterator[Any]:
    """All nodes of the graph that computed it."""
    todo = [root.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def is_unit_gatherer(node: Any) -> bool:
    """A node of a graph that FSDP2 put there: behind it are weights that are let go of after the first backward."""
    return "RegisterPostBackwardFunction" in node.name()


# --- how a loss was reduced -----------------------------------------------------------------------

MEAN, SUM = 1, 2
"""what torch's loss functions save of `reduction="mean"` and `"sum"`"""
LINEAR = frozenset(f"{name}Backward0" for name in ("Add", "Sub", "Mul", "Neg", "Squeeze", "View")) | {"MulBackward1"}
"""nodes of a graph behind which what was added up is still a sum"""
DIVISIONS = frozenset({"DivBackward0", "DivBackward1"})
"""by a tensor, which a Python number may be, too, and by a number"""
COPIES = frozenset({"CloneBackward0", "ToCopyBackward0", "AliasBackward0", "ViewBackward0", "ReshapeAliasBackward0"})
LEAF = "torch::autograd::AccumulateGrad"
"""the name of a node that puts a gradient into a parameter; a function of the user's may have a `variable`, too"""


def node_name(node: Any) -> str:
    return str(node.name())


def copied(tensor: torch.Tensor) -> Any:
    """The parameter that it is a copy of, or None."""
    node: Any = tensor.grad_fn
    while node is not None and node_name(node) in COPIES:
        node = node.next_functions[0][0]
    return node.variable if node is not None and node_name(node) == LEAF else None


def was_summed(node: Any) -> bool:
    """A loss function of torch's that was told `reduction="sum"`."""
    return getattr(node, "_saved_reduction", None) == SUM


def summed_shape(node: Any) -> tuple[int, ...]:
    """The shape that `tensor.sum()` has summed; empty for any other node."""
    if node_name(node) != "SumBackward0":
        return ()
    return tuple(map(int, getattr(node, "_saved_self_sym_sizes", ())))


def factors(node: Any) -> list[float]:
    """Numbers that a product has saved, if it is one of a tensor and a number."""
    if node_name(node) != "MulBackward0":
        return []
    saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    with without_modes():  # the same
        return [float(one) for one in saved if isinstance(one, torch.Tensor) and _is_number(one)]


def divisor(node: Any) -> float | None:
    """What a mean was divided by: of a loss function's over targets, what they count together, without those that are
    ignored; of `a / b`, b where that is one number."""
    name = node_name(node)
    if name.startswith("NllLoss"):
        found = getattr(node, "_saved_total_weight", None) if node._saved_reduction == MEAN else None
    else:
        found = getattr(node, "_saved_other", None) if name == "DivBackward0" else None
    if not isinstance(found, torch.Tensor) or found.dim() or found.is_complex():
        return None
    with without_modes():  # it may stand for a Python number, which they would be given
        return float(found.detach())


def _is_number(tensor: torch.Tensor) -> bool:
    return not tensor.dim() and not tensor.requires_grad and not tensor.is_complex() and tensor.device.type == "cpu"
