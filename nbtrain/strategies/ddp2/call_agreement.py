"""Has the ranks agree on a call before they put its parts together, in one small message from all to all.

Every rank of every node sends one for every call, also for one that is not cut. So a rank that comes alone is told so,
and whether a call is put together of parts is decided by all alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RankInfo
from nbtrain.strategies.kit.split_batch import CutCall, CutPlan

NUMBERS = 253
"""numbers that a rank sends: as many as no cell is likely to gather by itself"""
DEEP = 8
"""the most dimensions that a tensor may have"""
EACH = 3 + DEEP
FORM, DREW, HEAD = 2, 5, 6
"""where in a rank's numbers are: the form, the call, whether it drew random numbers; then its tensors begin"""

Agreed = list[list[int] | None]
"""for each tensor the number of rows of each rank. None: every rank has all of it"""

ALONE = (
    "Under ddp2 a batch is cut over the ranks of a node, so a model is called on every rank: evaluate on every rank, "
    "above `if rank == 0:`. Under --strategy ddp a rank may run a forward alone"
)
APART = (
    "Under ddp2 the ranks of a node see the same batches: let nothing of a batch depend on the rank, and let no rank "
    "draw random numbers alone, from which the loader's next order comes (below `if rank == 0:` write "
    "`with torch.random.fork_rng():` around it); and call a model on every rank, above `if rank == 0:`. Or use "
    "--strategy ddp"
)


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """What a rank has computed of a call. Empty: it wants whole batches."""

    plan: CutPlan | None = None
    key: Any = None
    tensors: Sequence[torch.Tensor] = ()
    size: int = 0
    """samples of this part"""
    drew: bool = False
    """whether random numbers were drawn for it"""

    def numbers(self) -> torch.Tensor:
        """As numbers: whether there is a part, its form, and of each tensor how it is put together, shape and sum."""
        numbers = torch.zeros(NUMBERS, dtype=torch.float64)
        known = self.plan is not None and self.plan.key == self.key
        if self.plan is None or len(self.tensors) > (NUMBERS - HEAD) // EACH:
            return numbers
        if any(t.dim() > DEEP for t in self.tensors):
            return numbers
        if not known and any(not t.dim() or len(t) != self.size for t in self.tensors):
            return numbers
        digest = hashlib.blake2b(repr(self.key).encode(), digest_size=6).digest()
        numbers[0], numbers[1] = 1 + len(self.tensors), int.from_bytes(digest, "little")
        for i, tensor in enumerate(self.tensors):
            at = HEAD + i * EACH
            same = known and self.plan.modes[i] == "same"
            numbers[at], numbers[at + 1] = 1 + same, tensor.dim()
            numbers[at + 2 : at + 2 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.float64)
            if same:
                numbers[at + EACH - 1] = tensor.detach().double().sum().cpu()
        return numbers


def sign_of(call: CutCall) -> list[float]:
    """Numbers by which the ranks of a node see that they call with the same batch."""
    first = next((t for t in call.tensors if t.dim()), None)
    content = 0.0
    if first is not None and first.device.type == "cpu" and not first.is_complex():  # a GPU would be waited for
        content = float(first.detach().double().nan_to_num().abs().sum())
    return [call.batch, 2 * call.module.training + torch.is_grad_enabled(), content]


def agree(part: ComputedPart, place: RankInfo, call: CutCall) -> tuple[Agreed | None, bool]:
    """(what was agreed; None for whole batches, whether some rank drew random numbers). Collective, among all ranks."""
    mine = part.numbers()
    mine[FORM:DREW], mine[DREW] = torch.tensor(sign_of(call), dtype=torch.float64), part.drew
    everybody = [torch.empty_like(mine) for _ in range(place.world_size)]
    try:
        dist.all_gather(everybody, mine)
    except NotSupported as error:
        raise NotSupported(f"{error}. {ALONE}") from None
    count = place.world_size // place.nodes
    rows = [answer.tolist() for answer in everybody]
    for start in range(0, place.world_size, count):
        _check([row[FORM:DREW] for row in rows[start : start + count]], start)
    nodes = [_together(rows[start : start + count]) for start in range(0, place.world_size, count)]
    agreed = None if any(node is None for node in nodes) else nodes[place.node]
    return agreed, any(row[DREW] for row in rows)


def _check(signs: Sequence[Sequence[float]], start: int) -> None:
    """Raises if the ranks of a node are not in the same call. `start`: the first of them."""
    first = signs[0]
    for i, sign in enumerate(signs):
        if sign[:2] != first[:2] or abs(sign[2] - first[2]) > 1e-5 * abs(first[2]):
            ways = ", ".join(f"rank {start + at} calls a model with {_said(signs[at])}" for at in (0, i))
            raise NotSupported(f"the ranks of a node see different batches: {ways}. {APART}")


def _said(sign: Sequence[float]) -> str:
    """The batch of a rank, in words."""
    return f"{int(sign[0])} samples (they sum up to {sign[2]:.6g}){'' if sign[1] % 2 else ' without gradients'}"


def _together(ranks: Sequence[Sequence[float]]) -> Agreed | None:
    """What the ranks of one node agree on; None for whole batches."""
    first = ranks[0]
    if not first[0] or any(other[:FORM] != first[:FORM] for other in ranks):
        return None
    agreed: Agreed = []
    for i in range(int(first[0]) - 1):
        at = HEAD + i * EACH
        tensors = [rank[at : at + EACH] for rank in ranks]
        mode, dims = tensors[0][0], int(tensors[0][1])
        if any(tensor[:2] != tensors[0][:2] for tensor in tensors):
            return None
        if mode == 2:
            far = max(abs(tensor[-1] - tensors[0][-1]) for tensor in tensors)
            if any(tensor[2:-1] != tensors[0][2:-1] for tensor in tensors) or far > 1e-3 * abs(tensors[0][-1]) + 1e-6:
                return None
            agreed.append(None)
        elif not dims or any(tensor[3:-1] != tensors[0][3:-1] for tensor in tensors):
            return None
        else:
            agreed.append([int(tensor[2]) for tensor in tensors])
    return agreed
