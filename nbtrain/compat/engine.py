"""torch's autograd engine: what a backward that runs now says of itself, and what is to happen when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbtrain.compat.internals import Internals

its = Internals("torch")
check = its.check

_task = its.name("torch._C._current_graph_task_id")
_keeps = its.name("torch._C._autograd._get_current_graph_task_keep_graph")
_saved_tensors_hooks = its.name("torch._C._autograd._top_saved_tensors_default_hooks")
_functorch_level = its.name("torch._C._functorch.peek_interpreter_stack")
its.members("torch.autograd.Variable._execution_engine", "queue_callback")


def in_backward() -> bool:
    """This thread computes a part of a backward: no public function says so. Layers that are computed again ask."""
    return bool(_task() != -1)


def keeps_graph() -> bool:
    """The backward that runs now was given `retain_graph=True`: its graph is to be gone through once more."""
    return bool(_keeps())


def after_backward(callback: Callable[[], Any]) -> None:
    """Call this once, when the backward that runs now has left all its gradients; as torch's own DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def saves_by_hooks() -> bool:
    """`torch.autograd.graph.saved_tensors_hooks` are in force in this thread; another thread would not have them."""
    return _saved_tensors_hooks(True) is not None


def in_functional_transform() -> bool:
    """Inside of `torch.func.vmap`, `grad` and the like, where a batch dimension may not be seen."""
    return _functorch_level() is not None


def is_unit_gatherer(node: Any) -> bool:
    """A node of a graph that FSDP2 put there: behind it are weights that are let go of after the first backward."""
    return "RegisterPostBackwardFunction" in node.name()
