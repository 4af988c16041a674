"""What goes from one stage to the next, and what goes to all ranks: any nest of tensors and other things.

First a head of fixed size says what comes, then come the tensors. Sending does not wait: a stage computes its next
micro-batch while the one before is on its way.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import pytree
from nbtrain.errors import NotSupported

HEAD = 1024
THIN = (
    "a stage returns a sparse tensor, which cannot be sent to the next under pipeline: let the module return "
    "tensor.to_dense(), or use --strategy ddp"
)


Packed = tuple[bytes, list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class StageChannel:
    """One rank's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._under_way: list[tuple[Any, torch.Tensor]] = []
        self._back: tuple[Any, Any] = (None, None)

    def send(self, value: Any, to: int, back: bool = False) -> None:
        self.put(packed(value), to, back)

    def put(self, message: Packed, to: int, back: bool = False) -> None:
        for tensor in (*self._heads(message[0]), *message[1]):
            if tensor.numel():
                work = dist.isend(tensor, to, group=self._group(back), tag=int(back))
                self._under_way.append((work, tensor))

    def receive(self, source: int, back: bool = False) -> Any:
        def get(tensor: torch.Tensor) -> None:
            dist.recv(tensor, source, group=self._group(back), tag=int(back))

        return self._receive(get)

    def share(self, value: Any, source: int, message: Packed | None = None) -> Any:
        """From one rank to all. `message`: it is packed already."""
        if dist.get_rank() == source:
            said, tensors = message or packed(value)
            for tensor in (*self._heads(said), *tensors):
                if tensor.numel():
                    _share(tensor, source)
            return value
        return self._receive(lambda tensor: _share(tensor, source))

    def settle(self) -> None:
        """What was sent has arrived."""
        while self._under_way:
            work, _ = self._under_way.pop(0)
            if work is not None:
                work.wait()

    def forget(self) -> None:
        self._under_way.clear()

    def _receive(self, get: Any) -> Any:
        head = torch.empty(HEAD, dtype=torch.uint8, device=self.device)
        get(head)
        found = head.cpu().numpy().tobytes()
        length = int.from_bytes(found[:8], "little")
        if (more := length + 8 - HEAD) > 0:
            rest = torch.empty(more, dtype=torch.uint8, device=self.device)
            get(rest)
            found += rest.cpu().numpy().tobytes()

        def taken(slot: Slot) -> torch.Tensor:
            tensor = slot.empty(self.device)
            if tensor.numel():
                get(tensor)
            return tensor.requires_grad_(slot.requires_grad)

        return pytree.tree_map_only(Slot, taken, pickle.loads(found[8 : 8 + length]))

    def _heads(self, said: bytes) -> list[torch.Tensor]:
        first = len(said).to_bytes(8, "little") + said[: HEAD - 8]
        heads = [torch.frombuffer(bytearray(first.ljust(HEAD, b"\0")), dtype=torch.uint8)]
        if rest := said[HEAD - 8 :]:
            heads.append(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
        return [head.to(self.device) for head in heads]

    def _group(self, back: bool) -> Any:
        """NCCL does what goes between two ranks in one order: what goes back has a group of its own there."""
        if not back or dist.get_backend() != "nccl":
            return None
        if self._back[0] is not dist.group.WORLD:
            self._back = dist.group.WORLD, dist.new_group()
        return self._back[1]


def _share(tensor: torch.Tensor, source: int) -> None:
    dist.broadcast(tensor.reshape(-1).view(torch.uint8), source)


def packed(value: Any) -> Packed:
    """As it is sent. Raises where it cannot be."""
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> Slot:
        if tensor.layout is not torch.strided:
            raise NotSupported(THIN)
        tensors.append(tensor.detach().contiguous())
        return Slot(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    slots = pytree.tree_map_only(torch.Tensor, slot, value)
    try:
        return pickled(slots), tensors
    except Exception as error:  # whatever an object of the user's says
        raise NotSupported(
            f"what a stage returns cannot be sent to the next under pipeline ({error}): let modules return tensors in "
            "tuples, lists or dicts, or use --strategy ddp"
        ) from None


def pickled(value: Any) -> bytes:
    """What goes beside the tensors."""
    out = io.BytesIO()
    _TensorPickler(out).dump(value)
    return out.getvalue()


class _TensorPickler(pickle.Pickler):
    """Refuses tensors inside objects: only their content would arrive, and no gradient would go back."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise TypeError("an object of a class of its own holds a tensor")
        return NotImplemented
