"""Tensors: versions, memory, hooks on gradients, and operations on many of them at once.

Nothing here imports torch before it is used: the notebook's side of the exchange reads it.
All of it is there in torch 2.8 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nbtrain.compat.internals import Internals

if TYPE_CHECKING:
    import torch

its = Internals("torch")

GRADIENT_HOOKS = "_backward_hooks"
"""the table behind `register_hook`"""
ACCUMULATED_HOOKS = "_post_accumulate_grad_hooks"
"""the table behind `register_post_accumulate_grad_hook`"""
ASKS_OF_FORM = frozenset({"_version", "_backward_hooks", "_base", "_is_view", "_has_compatible_shallow_copy_type"})
"""Functions of a tensor that read none of its values, as `__torch_function__` is told their names."""
OF_LISTS = "_foreach_", "_fused_", "_amp_"
"""How the names of functions begin that take lists of tensors, as optimizers do to step all at once."""
MAX_OF_EACH, NORM_OF_EACH = "_foreach_max", "_foreach_norm"
OF_EACH = "_foreach_"
"""Before the name of a function that does the same to each of a list."""
ZERO_MANY = "_foreach_zero_"
"""The function that zeroes many tensors in one call, as `zero_grad` does."""
UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
"""The function that a scaler calls with many gradients."""
COMPILER_NOTES = ("_dynamo", "_specialize_on", "_has_dynamo_dim_marking")
"""The beginnings of attributes that torch's compiler sets on a tensor, as `mark_dynamic` does."""

_data = attrgetter("data")
_PRINTED = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
its.members("torch._tensor_str", "PRINT_OPTS")
its.members(
    "torch.Tensor",
    *("_version", "_is_view", "_indices", "_values", "_use_count", "_make_subclass", "_backward_hooks", "_base"),
    "_post_accumulate_grad_hooks",
)
its.members("torch.UntypedStorage", "_cdata")
its.members(
    "torch",
    *("_conj", "_neg_view", "_foreach_mul_", "_foreach_copy_", NORM_OF_EACH, ZERO_MANY),
    "_has_compatible_shallow_copy_type",
    UNSCALES,
)
its.members("torch._C", "_swap_tensor_impl", "DisableTorchFunctionSubclass")
its.members("torch._utils", "_flatten_dense_tensors", "_unflatten_dense_tensors")


# --- what a tensor is ----------------------------------------------------------------------------


def version(tensor: torch.Tensor) -> int:
    """How often it was written to, as autograd counts; `.data` and fused optimizers are not seen. Documented in torch's
    notes on autograd, though its name is private."""
    return tensor._version


def shown_by(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory a view shows; the tensor itself where it is none."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows that it shows another tensor's memory."""
    return bool(tensor._is_view())


def is_leaf(tensor: torch.Tensor) -> bool:
    """`tensor.is_leaf`. Of a view that was made under `no_grad`, of a weight that has been written since, it raises,
    also where the program never uses the view again: that is none."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def of_one_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether these, which have storages, show the same."""
    here, there = tensor.untyped_storage(), other.untyped_storage()
    return bool(here.nbytes() and here.data_ptr() == there.data_ptr())


def memory_id(storage: Any) -> int:
    """A number that identifies a storage's memory: Python wraps the same storage anew each time it is asked for, and
    memory without bytes has no address."""
    return int(storage._cdata)


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values as they are; the public ones want them coalesced, which makes others."""
    return [tensor._indices(), tensor._values()]


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._values()


def conjugate_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view marked as conjugated, whatever the tensor was: `tensor.conj()` would take the mark off again."""
    import torch

    return torch._conj(tensor)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view marked as negated; there is no public way."""
    import torch

    return torch._neg_view(tensor)


# --- hooks on its gradient -----------------------------------------------------------------------


def hook_tables(tensor: Any) -> tuple[Mapping[int, Any] | None, Mapping[int, Any] | None]:
    """(on its gradient, after it was accumulated); None where there was never one. Nothing public lists hooks."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def hook_table(tensor: Any, name: str) -> dict[int, Any] | None:
    """One of the two, `GRADIENT_HOOKS` or `ACCUMULATED_HOOKS`; what is written into it hangs there."""
    table: dict[int, Any] | None = getattr(tensor, name, None)
    return table


BY_STRATEGIES = ("nbtrain.", "deepspeed.")
"""modules of the hooks by which a strategy averages gradients"""
BY_LIBRARIES = (*BY_STRATEGIES, "torch.")
"""and, on modules, of those by which torch computes weights (spectral_norm)"""


def is_users_hook(hook: Any, others: tuple[str, ...] = BY_STRATEGIES) -> bool:
    """Whether the user's program has registered this hook. `others`: modules whose hooks do not count."""
    return not module_of(hook).startswith(others)


def module_of(hook: Any) -> str:
    """The module in which a hook, or its class, was written."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def users_hooks(tensor: Any, name: str) -> list[tuple[int, Any]]:
    """(key, hook) of those that the user's program has registered; a strategy has its averaging beside them."""
    table = hook_table(tensor, name)
    return [pair for pair in table.items() if is_users_hook(pair[1])] if table else []


def put_gradient_hooks(tensor: Any, table: dict[int, Any]) -> None:
    """Make this very dict a tensor's table of hooks: it is the one that the handles of these hooks know."""
    tensor._backward_hooks = table


def can_have_hooks(kind: type) -> bool:
    """Whether this is a class of tensors, told without importing torch."""
    return hasattr(kind, GRADIENT_HOOKS)


# --- becoming another ----------------------------------------------------------------------------


def become(some: Iterable[Any], cls: Any = None) -> None:
    """Make these tensors of a class, which goes on being told as a parameter's; of their plain one again where none is
    given."""
    import torch
    from torch import nn

    for tensor in some:
        if cls is not None:
            if type(tensor) is nn.Parameter:
                tensor._is_param = True
            tensor.__class__ = cls
        elif type(tensor) not in (torch.Tensor, nn.Parameter):
            tensor.__class__ = nn.Parameter if vars(tensor).pop("_is_param", False) else torch.Tensor


def has_other_owners(tensor: Any) -> bool:
    """Whether something of torch's own refers to it: a graph, a view."""
    return bool(tensor._use_count() > 1)


def swap_memory(tensor: Any, new: Any) -> None:
    """Swap two tensors as `torch.utils.swap_tensors` does, which refuses those with weak references; recurrent layers
    keep some."""
    import torch

    torch._C._swap_tensor_impl(tensor, new)


def as_subclass_of(cls: type, tensor: torch.Tensor) -> Any:
    """An object of this class over the tensor's memory; `as_subclass` would go through `__torch_function__`."""
    import torch

    return torch.Tensor._make_subclass(cls, tensor)


def as_plain_tensors() -> Any:
    """A context in which no subclass's `__torch_function__` is called, as torch's own documentation of subclasses
    has it."""
    import torch

    return torch._C.DisableTorchFunctionSubclass()


# --- many at once: one call instead of one for each tensor -------------------------------------------


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Parts of it, of these shapes, in its memory; to autograd no views, which `detach_()` refuses."""
    import torch

    return (*map(_data, torch._utils._unflatten_dense_tensors(flat, like)),)


def multiply(tensors: list[torch.Tensor], factor: float) -> None:
    import torch

    torch._foreach_mul_(tensors, factor)


def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    import torch

    torch._foreach_copy_(targets, sources)


def norms(tensors: list[torch.Tensor], power: float) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch._foreach_norm(tensors, power))


def unscale(gradients: list[torch.Tensor], flag: torch.Tensor, share: torch.Tensor) -> None:
    """Multiply by `share`, and set `flag` to 1 where one is not finite, as torch's GradScaler does."""
    import torch

    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, share)


def print_options() -> dict[str, Any] | None:
    """What `torch.set_printoptions` has set; None where torch is not loaded, or keeps it elsewhere."""
    options: Any = getattr(sys.modules.get("torch._tensor_str"), "PRINT_OPTS", None)
    return None if options is None else {name: getattr(options, name) for name in _PRINTED if hasattr(options, name)}


# --- the state of the generator of the CPU -----------------------------------------------------------
# Its form is documented nowhere; it is this in torch 2.8 to 2.15.

_SEED = 8
"""bytes at its beginning that hold what `torch.initial_seed()` says, and that no number is drawn from"""


def seed_in(state: torch.Tensor) -> torch.Tensor:
    """The seed in a generator's state, as one number that can be written to."""
    import torch

    return state[:_SEED].view(torch.int64)


def without_seed(state: torch.Tensor) -> torch.Tensor:
    """The part of a generator's state that numbers are drawn from."""
    return state[_SEED:]
