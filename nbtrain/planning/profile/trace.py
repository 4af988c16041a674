"""What is alive while a model computes: each result is counted when it is made, and no more once nothing holds it.

It does not matter whether there is memory behind the numbers: tensors that are only shapes (torch's `FakeTensor`) die
when real ones would.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from nbtrain.compat import fake
from nbtrain.compat.tensors import memory_id, sparse_parts
from nbtrain.errors import UsageError
from nbtrain.strategies.estimates import Moment
from nbtrain.training.loop.flop_count import KNOWN, UNKNOWN


class CannotProfile(UsageError):
    """Nobody can say what a model needs: it cannot be run, or not with this batch."""


def size(tensor: torch.Tensor) -> int:
    """Bytes of its own numbers."""
    if tensor.is_sparse:
        return sum(map(size, sparse_parts(tensor)))
    return tensor.numel() * tensor.element_size()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """In tuples, lists, dicts and dataclasses, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from tensors(getattr(value, one.name, None))


class High(NamedTuple):
    bytes: int
    tick: int
    """things that had been made until then"""


class LiveBytes(fake.DispatchMode):
    """Bytes that operations have made and that are still held. `apart`: what was there before, and is not counted; of
    what is written to there and has content, the content is kept."""

    supports_higher_order_operators = True

    def __init__(self, apart: Iterable[torch.Tensor] = (), numbers: bool = False) -> None:
        """`numbers`: whoever wants a number, which nothing has, is told 1."""
        super().__init__()
        self.live = 0
        self._top = High(0, 0)
        self.operations = 0.0
        self.counted = True
        """nothing was computed of which nobody knows how much it is"""
        self._sizes: dict[int, int] = {}
        """of each storage, by its address; 0: it is not counted"""
        self._born: dict[int, int] = {}
        self._ticks = 0
        self._watched: dict[int, Any] = {}
        self._numbers = numbers
        self._guard: dict[int, torch.Tensor] = {}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in apart:
            self._watch(tensor, counted=False)
            if not (tensor.is_meta or tensor.is_sparse or isinstance(tensor, fake.FakeTensor)):
                self._guard[_address(tensor)] = tensor

    def high(self) -> High:
        """The most there was since this was last asked."""
        top, self._top = self._top, High(self.live, self._ticks)
        return top

    def stays(self, tensor: torch.Tensor) -> High:
        """It counts as if it were held for good; how much it is, and when it was made."""
        try:
            address = _address(tensor)
        except NotImplementedError:  # a sparse one, whose parts go on being counted
            return High(size(tensor), self._ticks)
        self._watched.pop(address, None)
        return High(self._sizes.pop(address, 0) or size(tensor), self._born.pop(address, self._ticks))

    def watched(self) -> list[Any]:
        """Weak references to whatever has memory now, what was there before included."""
        return list(self._watched.values())

    def undo(self) -> None:
        """What was written to has the content that it had."""
        while self._before:
            tensor, content = self._before.pop()
            with fake.without_modes(), torch.no_grad():
                tensor.detach().copy_(content)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._numbers and func is fake.READS_A_NUMBER:
            return 1.0 if args[0].is_floating_point() else 1
        schema = fake.schema_of(func)
        if self._guard and schema is not None and schema.is_mutable:
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
        self._count(func, args, kwargs, out)
        return out

    def _made(self, what: Any, alias: Any) -> None:
        """`alias`: it lies in the memory of something else: of a constant of the model, perhaps."""
        if alias is None:
            for tensor in tensors(what):
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
        self._born[address] = self._ticks
        self.live += self._sizes[address]
        if self.live > self._top.bytes:
            self._top = High(self.live, self._ticks)

    def _gone(self, address: int, _: Any) -> None:
        self.live -= self._sizes.pop(address, 0)
        self._watched.pop(address, None)
        self._born.pop(address, None)

    def _keep(self, schema: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors(args[i] if i < len(args) else kwargs.get(argument.name)):
                    kept = None if tensor.is_sparse else self._guard.pop(_address(tensor), None)
                    if kept is not None:
                        with fake.without_modes():
                            self._before.append((kept, kept.detach().clone()))

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = fake.packet_of(func)
        if packet in KNOWN:
            try:
                self.operations += KNOWN[packet](*args, **kwargs, out_val=out)
            except Exception:  # a form of the call that torch's formula does not know
                self.counted = False
        elif packet in UNKNOWN:
            self.counted = False


def _address(tensor: torch.Tensor) -> int:
    return memory_id(tensor.untyped_storage())


class Timeline:
    """The moments of a backward: each ends when the gradient of a weight is complete, and is as its worst instant."""

    def __init__(self, memory: LiveBytes, weights: Iterable[torch.Tensor], keeps: bool) -> None:
        """`keeps`: the gradients stay. Those of real numbers are only counted, and let go of at once."""
        self._memory = memory
        self._keeps = keeps
        self._highs: list[High] = []
        self._gradients: list[High] = []
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._complete) for weight in weights if weight.requires_grad
        ]

    def end(self) -> None:
        """Of the forward, or of the backward."""
        self._highs.append(self._memory.high())

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def moments(self) -> list[Moment]:
        # A gradient is one from when it was made, not from when torch says that it is complete.
        found = []
        for high in self._highs:
            gradients = sum(one.bytes for one in self._gradients if one.tick <= high.tick)
            found.append(Moment(max(high.bytes - gradients, 0), gradients))
        return found

    def _complete(self, weight: torch.Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        self.end()
        self._gradients.append(self._memory.stays(gradient))
        if not self._keeps:
            weight.grad = None
