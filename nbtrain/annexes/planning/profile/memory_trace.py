"""Counts the bytes that are alive while a model computes: each tensor from when it is made until nothing holds it.

It works for real and for fake tensors alike: both are freed at the same moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from nbtrain.base.errors import UsageError
from nbtrain.compat import fake_tensors
from nbtrain.compat.tensors import memory_id, sparse_parts
from nbtrain.strategies.kit.call_arguments import all_tensors
from nbtrain.strategies.memory_estimate import Moment


class CannotProfile(UsageError):
    """The model cannot be profiled, because it does not run, or not with this batch."""


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    if tensor.is_sparse:
        return sum(map(size, sparse_parts(tensor)))
    return tensor.numel() * tensor.element_size()


class TracePeak(NamedTuple):
    """The most bytes that were alive, and when."""

    bytes: int
    tick: int
    """number of storages made until then"""


class LiveBytes(fake_tensors.DispatchMode):
    """Counts bytes that operations allocate and that are still alive. `apart`: tensors that existed before, which are
    not counted; their content is saved before an operation writes to them, and `undo` restores it."""

    supports_higher_order_operators = True

    def __init__(self, apart: Iterable[torch.Tensor] = (), numbers: bool = False) -> None:
        """`numbers`: reading a number from a tensor without content gives 1."""
        super().__init__()
        self.live = 0
        self._top = TracePeak(0, 0)
        self._sizes: dict[int, int] = {}
        """bytes of each storage, by its address; 0: it is not counted"""
        self._made_at: dict[int, int] = {}
        self._ticks = 0
        self._watched: dict[int, Any] = {}
        self._numbers = numbers
        self._unsaved: dict[int, torch.Tensor] = {}
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in apart:
            self._watch(tensor, counted=False)
            if not (tensor.is_meta or tensor.is_sparse or isinstance(tensor, fake_tensors.FakeTensor)):
                self._unsaved[_address(tensor)] = tensor

    def peak(self) -> TracePeak:
        """The peak since the last call."""
        top, self._top = self._top, TracePeak(self.live, self._ticks)
        return top

    def count_for_good(self, tensor: torch.Tensor) -> TracePeak:
        """Count this tensor as alive for good. Returns its bytes, and when it was made."""
        try:
            address = _address(tensor)
        except NotImplementedError:  # a sparse one, whose parts are still counted
            return TracePeak(size(tensor), self._ticks)
        self._watched.pop(address, None)
        return TracePeak(self._sizes.pop(address, 0) or size(tensor), self._made_at.pop(address, self._ticks))

    def watched(self) -> list[Any]:
        """Weak references to all storages that are alive, also to those that existed before."""
        return list(self._watched.values())

    def undo(self) -> None:
        """Restore the content of the tensors of `apart` that were written to."""
        while self._saved:
            tensor, content = self._saved.pop()
            with fake_tensors.without_modes(), torch.no_grad():
                tensor.detach().copy_(content)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._numbers and func is fake_tensors.READS_A_NUMBER:
            return 1.0 if args[0].is_floating_point() else 1
        schema = fake_tensors.schema_of(func)
        if self._unsaved and schema is not None and schema.is_mutable:
            self._keep(schema, args, kwargs)
        out = func(*args, **kwargs)
        returns: Sequence[Any] = schema.returns if schema is not None else ()
        if len(returns) == 1:
            self._made(out, returns[0].alias_info)
        elif isinstance(out, tuple | list):
            for i, one in enumerate(out):
                self._made(one, returns[i].alias_info if i < len(returns) else None)
        else:
            self._made(out, None)
        return out

    def _made(self, what: Any, alias: Any) -> None:
        """Count a result. `alias`: it is a view of another tensor, and not counted."""
        if alias is None:
            for tensor in all_tensors(what):
                self._watch(tensor)

    def _watch(self, tensor: torch.Tensor, counted: bool = True) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse one
            return
        address = memory_id(storage)
        if address in self._sizes:
            return
        self._sizes[address] = storage.nbytes() if counted else 0
        self._watched[address] = weakref.ref(storage, partial(self._gone, address))
        self._ticks += 1
        self._made_at[address] = self._ticks
        self.live += self._sizes[address]
        if self.live > self._top.bytes:
            self._top = TracePeak(self.live, self._ticks)

    def _gone(self, address: int, _: Any) -> None:
        self.live -= self._sizes.pop(address, 0)
        self._watched.pop(address, None)
        self._made_at.pop(address, None)

    def _keep(self, schema: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in all_tensors(args[i] if i < len(args) else kwargs.get(argument.name)):
                    kept = None if tensor.is_sparse else self._unsaved.pop(_address(tensor), None)
                    if kept is not None:
                        with fake_tensors.without_modes():
                            self._saved.append((kept, kept.detach().clone()))


def _address(tensor: torch.Tensor) -> int:
    return memory_id(tensor.untyped_storage())


class Timeline:
    """The peaks of a forward and a backward: one for each weight, up to when its gradient is complete."""

    def __init__(self, memory: LiveBytes, weights: Iterable[torch.Tensor], keeps: bool) -> None:
        """`keeps`: gradients stay. Otherwise they are counted and freed at once."""
        self._memory = memory
        self._keeps = keeps
        self._peaks: list[TracePeak] = []
        self._gradients: list[TracePeak] = []
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._complete) for weight in weights if weight.requires_grad
        ]

    def end(self) -> None:
        """The forward or the backward is over."""
        self._peaks.append(self._memory.peak())

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def moments(self) -> list[Moment]:
        # A gradient counts from when it was made, not from when torch calls its hook.
        found = []
        for peak in self._peaks:
            gradients = sum(one.bytes for one in self._gradients if one.tick <= peak.tick)
            found.append(Moment(max(peak.bytes - gradients, 0), gradients))
        return found

    def _complete(self, weight: torch.Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        self.end()
        self._gradients.append(self._memory.count_for_good(gradient))
        if not self._keeps:
            weight.grad = None
