"""Compares many small tensors at once.

A model with its optimizer state is often a thousand tensors of a few kilobytes. Asking each for its
checksum costs more in calls than in bytes, so those that stand where they stood are copied one after
another into a buffer that fits the processor's cache, and the buffer has one checksum. Only where
that differs is every tensor of the chunk looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

from nbtrain.compat import tensors
from nbtrain.exchange.kinds.checksum import lanes

if TYPE_CHECKING:
    import torch

    from nbtrain.exchange.kinds.base import Node

CHUNK = 1 << 20
"""Bytes compared at once."""


class MemoryForm:
    """How a tensor lies in memory; of a small one also its bytes, for as long as it lies there."""

    __slots__ = ("flat", "form", "memory", "window")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.form = form_of(tensor)
        self.window = window_of(tensor)
        self.flat: torch.Tensor | None = None
        self.memory: memoryview | None = None
        """the same bytes, to be read and written without torch"""

    def flatten(self, tensor: torch.Tensor) -> None:
        import torch

        self.flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self.memory = memoryview(self.flat.numpy())

    def bytes_of(self, tensor: torch.Tensor) -> memoryview | None:
        """The bytes of a small tensor that lies where it lay; None of others, and of one with attributes."""
        return None if self.memory is None or self.form != form_of(tensor) or vars(tensor) else self.memory


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    hooks, after = tensors.hook_tables(tensor)
    counts = (hooks and len(hooks), after and len(after)) if hooks or after else None
    try:
        leaf = tensor.is_leaf
    except RuntimeError:  # as `tensors.is_leaf` has it; a call more for each tensor would be felt
        leaf = False
    marked = tensor.is_conj(), tensor.is_neg(), leaf
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, marked, counts


def window_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which part of its memory a tensor shows, and how."""
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


@dataclass(slots=True)
class _Chunk:
    nodes: list[Node]
    flats: list[torch.Tensor]
    number: int
    seens: list[Any] = field(default_factory=list)


class BulkCompare:
    """Finds the small tensors that changed. Remembers chunks of neighbours: each walk meets them in the same order."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Chunk] = {}
        self._buffer: torch.Tensor | None = None
        self._doubted: list[_Chunk] = []

    def forget(self, forms: Iterable[Any]) -> None:
        """No longer hold these tensors. Other chunks stay: to compare all anew takes longer than all else."""
        flats = {id(form.flat) for form in forms if isinstance(form, MemoryForm) and form.flat is not None}
        self._doubted.clear()
        for key, chunk in list(self._chunks.items()) if flats else ():
            if not flats.isdisjoint(map(id, chunk.flats)):
                del self._chunks[key]

    def changed(self, nodes: list[Node]) -> tuple[list[Node], list[Node]]:
        """The nodes that may differ from what was seen of them: in anything; in nothing but their bytes (`memo.memory`)
        and hooks. The others certainly do not."""
        doubtful: list[Node] = []
        rewritten: list[Node] = []
        group: list[Node] = []
        flats: list[torch.Tensor] = []
        size = 0
        for node in nodes:
            memo, tensor = node.memo, node.obj
            # One with attributes is looked at for what they lead to.
            flat = None if memo is None else memo.flat
            if flat is None or node.seen is None or tensor.__dict__ or memo.form != form_of(tensor):
                doubtful.append(node)
                continue
            group.append(node)
            flats.append(flat)
            size += tensor.nbytes
            if size >= CHUNK:
                rewritten += self._differing(group, flats, size)
                group, flats, size = [], [], 0
        if group:
            rewritten += self._differing(group, flats, size)
        return doubtful, rewritten

    def _differing(self, group: list[Node], flats: list[torch.Tensor], size: int) -> list[Node]:
        import torch

        torch.cat(flats, out=self._scratch()[:size])
        number = lanes(self._scratch().numpy()[:size])
        first = group[0].key
        chunk = self._chunks.get(first)
        seens = [node.seen for node in group]
        # What was seen of a tensor is another object after each change, whoever made it known.
        same = (
            chunk is not None
            and chunk.number == number
            and len(chunk.flats) == len(flats) == len(chunk.seens)
            and all(map(is_, chunk.flats, flats))
            and all(map(is_, chunk.seens, seens))
        )
        if same:
            return []
        self._chunks[first] = new = _Chunk(group, flats, number)
        self._doubted.append(new)
        return group

    def _scratch(self) -> torch.Tensor:
        import torch

        if self._buffer is None:
            self._buffer = torch.empty(2 * CHUNK, dtype=torch.uint8)
        return self._buffer

    def looked(self) -> None:
        """Note what was seen of the doubtful ones: all of them have been looked at."""
        for chunk in self._doubted:
            chunk.seens = [node.seen for node in chunk.nodes]
        self._doubted.clear()

    def settle(self, written: Mapping[int, memoryview]) -> None:
        """Number the chunks of which all was written, so that the next walk need not doubt them. From the bytes that
        came: what a thread of the user's has changed meanwhile is found by that walk."""
        for chunk in self._chunks.values() if written else ():
            pairs = zip(chunk.nodes, chunk.flats, strict=True)
            if not all(node.key in written and node.memo.flat is flat for node, flat in pairs):
                continue
            scratch = self._scratch().numpy()
            there, at = memoryview(scratch), 0
            for node in chunk.nodes:
                data = written[node.key]
                there[at : at + data.nbytes] = data
                at += data.nbytes
            chunk.number = lanes(scratch[:at])
            chunk.seens = [node.seen for node in chunk.nodes]
