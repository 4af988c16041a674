"""What a rank holds of a component in stages: its own stage's tensors whole, one number in the place of others.

Every rank knows which gradients there are. Whatever else a cell does with such tensors is reading and writing of them
(`strategies/kit/stage_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.base import Piece
from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks
from nbtrain.strategies.kit.owned_tensors import OwnedTensor, full_tensor, stand_in
from nbtrain.strategies.kit.stage_spot import spot_of
from nbtrain.strategies.kit.stage_tensor import SPARSE, gradient_elsewhere, is_stage_tensor
from nbtrain.strategies.kit.stage_tensors import StageTensors
from nbtrain.strategies.kit.written_numbers import NOTHING, begin, check, found_gradients, norms, numbers, told
from nbtrain.strategies.pipeline.cut_stages import Owners

HALF = (
    "a backward failed and was caught, and the gradients that it left are about to be used: under pipeline they are "
    "those of some stages and micro-batches only. Write `optimizer.zero_grad()` where the error is caught"
)

APART = (
    "this rank has frozen weights, and others have not (below `if rank == 0:`), and under pipeline one rank steps a "
    "weight for all of them: write the same on every rank"
)
TRAINS = 4
"""in what a rank tells of a weight: it is not frozen. Ranks tell the same"""


class StageParameters:
    """The parameters and gradients of one component, on the rank that owns them or elsewhere."""

    def __init__(self, owners: Owners, rank: int, stage_tensors: StageTensors) -> None:
        self.owners, self.rank, self.stage_tensors = owners, rank, stage_tensors
        self.trained = [p for p in owners.owned if isinstance(p, torch.nn.Parameter)]
        self._aside: list[tuple[torch.Tensor, Any]] = []
        self.half = False
        """a backward has failed, and left gradients; on every rank or on none"""

    def foreign(self, tensor: torch.Tensor) -> bool:
        return self.owners.is_foreign(tensor, self.rank)

    @torch.no_grad()
    def hide(self) -> None:
        """Let go of what is another rank's."""
        for tensor in self.owners.owned:
            if self.foreign(tensor) and _is_whole(tensor):
                tensor.data = stand_in(tensor.data)
                if tensor.grad is not None:
                    tensor.grad = gradient_elsewhere(tensor, self.stage_tensors, self.owners.of[id(tensor)])
            elif not self.foreign(tensor) and not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()  # also what was made hollow; the others know nothing of strides
        for p in self.owners.shared:
            if not _is_whole(p):
                p.data = p.data.contiguous()

    def places(self) -> Iterator[tuple[torch.Tensor, int]]:
        """What lies on one rank: (tensor, the rank)."""
        return ((tensor, self.owners.of[id(tensor)]) for tensor in self.owners.owned)

    # --- gradients -----------------------------------------------------------------------------

    @torch.no_grad()
    def tell_gradients(self, device: torch.device) -> None:
        """After a backward: who has one; and whether all have written the same, and frozen the same. Collective."""
        if not self.trained:
            return
        with tensors.as_plain_tensors():
            have = [0 if self.foreign(p) or p.grad is None else 1 + p.grad.is_sparse for p in self.trained]
            mine = [TRAINS * p.requires_grad for p in self.trained]
            own = told() if numbers or norms else NOTHING
            flags = torch.tensor([*map(sum, zip(have, mine, strict=True)), *own], dtype=torch.float32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            *every, number, logarithms, least, least_logarithms = flags.tolist()
            if [int(one) - int(one) % TRAINS for one in every] != mine:  # a rank that tells less ends the cell on all
                raise NotSupported(APART)
            if number or logarithms or least or least_logarithms:
                check((number, logarithms, least, least_logarithms))
                begin()
            for p, there in zip(self.trained, (int(one) % TRAINS for one in every), strict=True):
                if self.foreign(p) and not there:
                    p.grad = None
                elif self.foreign(p) and not is_stage_tensor(p.grad):
                    p.grad = gradient_elsewhere(p, self.stage_tensors, self.owners.of[id(p)], there > 1)

    def own_gradients(self) -> list[torch.Tensor]:
        with tensors.as_plain_tensors():
            return [p.grad for p in self.trained if not self.foreign(p) and p.grad is not None]

    def check_half(self, device: torch.device) -> None:
        """Before gradients are added to, or used: some micro-batches have brought theirs, and some not. Collective, if
        a backward has failed."""
        if not self.half:
            return
        with tensors.as_plain_tensors():
            left = torch.tensor([int(any(bool(grad.to_dense().any()) for grad in self.own_gradients()))]).to(device)
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
        if left.item():
            raise NotSupported(HALF)
        self.half = False

    def note(self, step: bool) -> None:
        """Before a backward, or a step."""
        with tensors.as_plain_tensors():
            found_gradients([p.grad is not None for p in self.trained], usual=step)

    def set_aside(self) -> None:
        """Before an optimizer steps, or a backward adds: no foreign gradients."""
        with tensors.as_plain_tensors():
            self._aside += [(p, p.grad) for p in self.trained if self.foreign(p) and p.grad is not None]
            for p, _ in self._aside:
                p.grad = None

    def put_back(self) -> None:
        with tensors.as_plain_tensors():
            while self._aside:
                p, grad = self._aside.pop()
                if p.grad is None:
                    p.grad = grad

    @torch.no_grad()
    def clip(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
    ) -> torch.Tensor:
        """As torch's `clip_grad_norm_`: what every rank has counts once. Collective."""
        grads = [(p, p.grad) for p in parameters if p.grad is not None and not self.foreign(p)]
        own = [grad for p, grad in grads if id(p) in self.owners.of]
        rest = [grad for p, grad in grads if id(p) not in self.owners.of]
        # In double: ranks may have gradients of other types, or none.
        total = norm_over_ranks(own, norm_type, device, rest, torch.float64)
        total = total.to(torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32)
        clip_to((*own, *rest), total, max_norm)
        return total

    # --- pieces --------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        return ((tensor, self._piece(tensor, tensor)) for tensor in self.owners.owned)

    def gradient_pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        for p in self.trained:
            if p.grad is not None:
                elsewhere = is_stage_tensor(p.grad) and spot_of(p.grad).sparse
                yield p, self._piece(p.grad, p, SparseGradient if p.grad.is_sparse or elsewhere else OwnedTensor)

    def _piece(self, tensor: torch.Tensor, of: torch.Tensor, kind: type[OwnedTensor] = OwnedTensor) -> Piece:
        mine = not self.foreign(of)
        return kind(tensor, mine, mine, self)

    @torch.no_grad()
    def gather(self, only: list[torch.Tensor] | None = None) -> None:
        """Everything, or `only` these, is whole on every rank. Collective."""
        if self.trained:
            self.tell_gradients(self.trained[0].device)
        chosen = {id(t) for t in (self.owners.owned if only is None else only)}
        for tensor, piece in self.pieces():
            if id(tensor) in chosen:
                full = self._whole(piece, tensor.device)
                tensor.data = full if self.foreign(tensor) else tensor.data
        for p, piece in self.gradient_pieces():
            if id(p) in chosen:
                full = self._whole(piece, p.device)
                p.grad = full if self.foreign(p) else p.grad

    def _whole(self, piece: Piece, device: torch.device) -> torch.Tensor:
        return full_tensor(piece, self.stage_tensors.device).to(device)

    @torch.no_grad()
    def let_gradients_go(self) -> None:
        """Between cells a parameter that is another rank's has none here."""
        self.half = False
        for p in self.trained:
            if self.foreign(p):
                p.grad = None


class SparseGradient(OwnedTensor):
    """Cannot be shown complete; said on every rank."""

    def read(self) -> Sequence[torch.Tensor]:
        raise NotSupported(SPARSE)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= 1 or any(tensor.stride())
