"""Fake tensors, which have shapes and no values, and the modes that see each operation. All of it is there in torch 2.8
to 2.15."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nbtrain.compat.internals import Internals

its = Internals("torch")

FakeTensor: Any = its.name("torch._subclasses.fake_tensor.FakeTensor")
ASKED_FOR_A_NUMBER: Any = its.name("torch._subclasses.fake_tensor.DataDependentOutputException")
"""What is raised where a program looks at the numbers of one."""
FakeTensorMode: Any = its.name("torch._subclasses.fake_tensor.FakeTensorMode")
DispatchMode: Any = its.name("torch.utils._python_dispatch.TorchDispatchMode")
"""The base class of modes whose `__torch_dispatch__` sees each operation. torch's own examples import it from there."""
without_modes: Any = its.name("torch.utils._mode_utils.no_dispatch")
"""A context in which operations reach no mode."""
_current = its.name("torch.utils._python_dispatch._get_current_dispatch_mode")
_dispatch_modes = its.name("torch._C._len_torch_dispatch_stack")
_function_modes = its.name("torch._C._len_torch_function_stack")
READS_A_NUMBER: Any = its.name("torch.ops.aten._local_scalar_dense.default")
"""The operation behind `tensor.item()`."""
LOGGER = "torch._subclasses.fake_tensor"
"""where torch reports what cannot be done without values"""
ASKS_OF_FORM = frozenset({"_is_view"})
"""Functions that a mode is told of and that read no values."""
SWITCHES = frozenset({"_set_grad_enabled", "set_grad_enabled", "_enter_autocast", "_exit_autocast"})
"""Calls that a function mode sees when `no_grad` and `autocast` are entered and left."""

aten = torch.ops.aten


@contextmanager
def quiet() -> Iterator[None]:
    """Silence that logger: nbtrain reports such errors itself."""
    logger = logging.getLogger(LOGGER)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def current_mode() -> Any:
    """The innermost mode that sees operations; None without one."""
    return _current()


def dispatch_modes() -> int:
    """How many modes see operations."""
    return int(_dispatch_modes())


def function_modes() -> int:
    """How many modes see functions (`torch.device(...)` as a context is one)."""
    return int(_function_modes())


def schema_of(operation: Any) -> Any:
    """An operation's schema, which has no public name; None where it has none."""
    return getattr(operation, "_schema", None)


def packet_of(operation: Any) -> Any:
    """The packet of all overloads of an operation, for which FLOP formulas are registered."""
    return getattr(operation, "_overloadpacket", operation)


def is_of_shapes(error: BaseException) -> bool:
    """Whether an error only says that fake tensors have no values."""
    return type(error).__module__.startswith("torch._subclasses")


def wants_numbers(error: BaseException) -> bool:
    """Whether an error says that a forward reads values."""
    return is_of_shapes(error) and type(error).__name__.startswith(("DataDependent", "DynamicOutput"))


def attention_on_cpu(backward: bool) -> list[Any]:
    """The operations in which a CPU computes attention: torch has FLOP formulas for those of GPUs only."""
    return packets("_scaled_dot_product_flash_attention_for_cpu" + ("_backward" if backward else ""))


def whole_networks() -> frozenset[Any]:
    """The operations that compute a recurrent network in one call."""
    return frozenset(packets("_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "miopen_rnn"))


def packets(*names: str) -> list[Any]:
    """Aten's operations of these names; not every build of torch has all."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]
