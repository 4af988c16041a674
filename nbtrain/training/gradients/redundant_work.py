"""Finds out whether all ranks compute the same: a loop over all of the data, a generator, a slice for each step.

The results are right then, but all ranks but one work for nothing. It shows in what a rank has before anything is
averaged: a gradient of its own, and its loss. Looked at in the first, second, fourth, eighth … backward of a cell,
some thousand numbers each time; the notebook compares what comes of it when the cell ends. One backward alone may be of
a penalty, which is the same whatever the batch is. Where a loader is shared out batches differ, and nothing is looked
at. A hint breaks no cell: where a look fails, there is none.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from nbtrain.compat import autograd_engine

FEW = 2
"""Backwards that have to be the same."""
NODES = 3000
"""Nodes of a graph that are looked at, from the loss on."""
LEAVES = 8
"""Parameters found there, one of which is chosen."""
LARGE = 1 << 16
"""Elements of a gradient that are read at the most."""


class RedundantWork:
    """Looks at what a rank computes in a cell, for a checksum that ranks can compare."""

    def __init__(self) -> None:
        self.begin(False)

    def begin(self, on: bool) -> None:
        """`on`: whether ranks are expected to work on different batches."""
        self.on = on
        self.backwards = self.looked = 0
        self._sum = 0
        self._handles: list[Any] = []

    def shared(self) -> None:
        """A loader deals out batches, or the user already knows that it does not: look no further."""
        self.on = False
        self._let_go()

    def backward(self, tensors: Any) -> None:
        """A backward is about to begin from these."""
        self._let_go()
        self.backwards += 1
        if self.backwards & (self.backwards - 1):
            return
        try:
            self._look(tensors)
        except Exception:  # a tensor of a class of its own, whose numbers cannot be read
            self.shared()

    def _look(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        plain = all(map(_is_plain, roots)) and not capturing
        leaves = islice(_leaves(root.grad_fn for root in roots), LEAVES) if plain else ()
        # A matrix rather than a bias (a sum over samples), and a small one rather than a large one.
        found = min(leaves, key=lambda node: (node.variable.dim() < 2, node.variable.numel() > LARGE), default=None)
        if found is None:  # there is no telling
            self.on = False
            return
        self._handles = [found.register_prehook(self._arrives)]
        self._add(*roots)

    def number(self) -> int | None:
        """A checksum of all that was looked at; None: that is not enough to tell."""
        self._let_go()
        return self._sum if self.on and self.looked >= FEW else None

    def _arrives(self, grads: Any) -> None:
        """Called with a rank's own gradient, before it is accumulated."""
        self._let_go()
        grad: Any = grads[0] if grads else None
        try:
            if not _is_plain(grad) or not grad.count_nonzero():
                self.on = False  # zeros are the same whatever they are of
                return
            self.looked += 1
            self._add(grad)
        except Exception:  # a hint breaks no cell
            self.on = False

    def _add(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)[:LARGE].cpu().resolve_conj().resolve_neg().contiguous()
            self._sum = zlib.crc32(flat.view(torch.uint8).numpy(), self._sum)

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and autograd_engine.is_plain(tensor)


def _leaves(roots: Iterable[Any]) -> Iterator[Any]:
    """Nodes that accumulate the gradient of a parameter, those next to the loss first."""
    waiting = deque(root for root in roots if root is not None)
    seen = set(waiting)
    while waiting and len(seen) < NODES:
        node = waiting.popleft()
        if (
            isinstance(getattr(node, "variable", None), torch.Tensor)
            and autograd_engine.node_name(node) == autograd_engine.LEAF
        ):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
