"""What a rank holds of a component in stages: its own stage's tensors whole, one number in the place of others.

The same of the state of optimizers. Every rank knows what there is and which shape it has: a state that a step has made
is told to the others at the end of the step. Whatever else a cell does with such tensors is reading and writing of them
(`strategies/kit/stage_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While
from nbtrain.strategies.base import Piece
from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks
from nbtrain.strategies.kit.owned_tensors import OwnedTensor, stand_in
from nbtrain.strategies.kit.stage_tensors import StageTensors
from nbtrain.strategies.kit.tensor_spots import gradient_elsewhere, is_stage_tensor
from nbtrain.strategies.pipeline.cut_stages import Owners
from nbtrain.strategies.pipeline.stage_messages import advising

TOGETHER = (
    "Under pipeline every rank steps, after a backward on every rank: in place of leaving a backward out on one of "
    "them write `(loss * 0).backward()` on all, or use --strategy ddp"
)

HALF = (
    "a backward failed and was caught, and the gradients that it left are about to be used: under pipeline they are "
    "those of some stages and micro-batches only. Write `optimizer.zero_grad()` where the error is caught"
)

Layout = list[tuple[Any, Any]] | None
"""of one parameter's state: (key, (shape, dtype, device) or a value that is no tensor); None where there is none"""


class StageParameters:
    """The parameters, gradients and optimizer state of one component, on the rank that owns them or elsewhere."""

    def __init__(self, owners: Owners, optimizers: Iterable[Optimizer], rank: int, stage_tensors: StageTensors) -> None:
        self.owners, self.rank, self.stage_tensors = owners, rank, stage_tensors
        self.strides: dict[int, Any] = {}
        """id → strides on its rank, of those that are not contiguous there"""
        self._optimizers = [ref(optimizer) for optimizer in optimizers]
        self.trained = [p for p in owners.owned if isinstance(p, torch.nn.Parameter)]
        self._told: dict[tuple[int, int], Layout] = {}
        """(id of the optimizer, of the parameter) → what the others know of its state"""
        self._aside: list[tuple[torch.Tensor, Any]] = []
        self.half: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """the gradients that a backward has left that failed; on every rank or on none"""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The component's optimizers, and those that a cell has made for it: the cell holds these."""
        return [optimizer for alive in self._optimizers if (optimizer := alive()) is not None]

    @optimizers.setter
    def optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = [ref(optimizer) for optimizer in optimizers]

    def foreign(self, tensor: torch.Tensor) -> bool:
        return self.owners.is_foreign(tensor, self.rank)

    @torch.no_grad()
    def hide(self) -> None:
        """Let go of what is another rank's."""
        for tensor in self.owners.owned:
            if _is_whole(tensor) and not tensor.is_contiguous():
                self.strides[id(tensor)] = tensor.stride()
            if self.foreign(tensor) and _is_whole(tensor):
                tensor.data = stand_in(tensor.data)
                if tensor.grad is not None:
                    tensor.grad = gradient_elsewhere(tensor, self.stage_tensors, self.owners.of[id(tensor)])
            elif not self.foreign(tensor) and not tensor.is_contiguous() and not _is_whole(tensor):
                tensor.data = tensor.data.contiguous()  # what was made hollow
        for p in self.owners.shared:
            if not _is_whole(p):
                p.data = p.data.contiguous()
        self.hide_states()

    @torch.no_grad()
    def hide_states(self) -> None:
        """The same of what the notebook, or a checkpoint, has put into the optimizers. All ranks have the same."""
        for optimizer in self.optimizers:
            for p in self._of(optimizer):
                state: Any = optimizer.state.get(p)
                with tensors.as_plain_tensors():
                    for _, value in _tensors(state) if self.foreign(p) else ():
                        if _is_whole(value):
                            value.data = stand_in(value.data)
                    self._told[id(optimizer), id(p)] = _layout(state)
        if self.stage_tensors.open:
            self.stage_tensors.add(self.states())

    def _of(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The owned parameters that it holds, in its order."""
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in self.owners.of]

    def places(self) -> Iterator[tuple[torch.Tensor, int, Any]]:
        """What lies on one rank: (tensor, the rank, its strides there)."""
        for tensor in self.owners.owned:
            yield tensor, self.owners.of[id(tensor)], self.strides.get(id(tensor))

    def states(self) -> Iterator[tuple[torch.Tensor, int, Any]]:
        """The same of what optimizers remember."""
        for optimizer in self.optimizers:
            for p in self._of(optimizer):
                for _, value in _tensors(optimizer.state.get(p)):
                    yield value, self.owners.of[id(p)], None

    def stepped(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """What a step of it works on besides parameters: this rank's gradients, and states."""
        found: list[torch.Tensor] = []
        with tensors.as_plain_tensors():
            for p in self._of(optimizer):
                if not self.foreign(p):
                    found += [value for _, value in _tensors(optimizer.state.get(p))]
                    if p.grad is not None:
                        found.append(p.grad)
        return found

    def missed(self, optimizer: Optimizer) -> None:
        """Before it steps: the cell may have thrown states away. All ranks have, and what comes anew is told anew."""
        for p in self._of(optimizer):
            if self.foreign(p):
                continue
            state: Any = optimizer.state.get(p)
            complete = bool(state)
            for value in state.values() if complete else ():
                if value is None:
                    complete = False
            if not complete:
                self._told[_key(optimizer, p)] = _layout(state)

    # --- gradients -----------------------------------------------------------------------------

    @torch.no_grad()
    def tell_gradients(self, device: torch.device) -> None:
        """After a backward: who has one. Collective."""
        if not self.trained:
            return
        with tensors.as_plain_tensors():
            have = [0 if self.foreign(p) or p.grad is None else 1 + p.grad.is_sparse for p in self.trained]
            flags = torch.tensor(have).to(device, torch.uint8)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            for p, there in zip(self.trained, flags.tolist(), strict=True):
                if self.foreign(p) and not there:
                    p.grad = None
                elif self.foreign(p) and not is_stage_tensor(p.grad):
                    p.grad = gradient_elsewhere(p, self.stage_tensors, self.owners.of[id(p)], there > 1)

    def own_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with tensors.as_plain_tensors():
            return [(p, p.grad) for p in self.trained if not self.foreign(p) and p.grad is not None]

    def check_half(self, device: torch.device) -> None:
        """Before gradients are added to, or used: some micro-batches have brought theirs, and some not. Collective, if
        a backward has failed."""
        if self.half is None:
            return
        with tensors.as_plain_tensors():
            left = torch.tensor([int(any(p.grad is g and bool(g.to_dense().any()) for p, g in self.half))])
        left = left.to(device)
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
        if left.item():
            raise NotSupported(HALF)
        self.half = None

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
    def clip(self, held: list[torch.Tensor], max_norm: float, norm_type: float, device: torch.device) -> torch.Tensor:
        """As torch's `clip_grad_norm_`: what every rank has counts once. Collective."""
        grads = [(p, p.grad) for p in held if p.grad is not None and not self.foreign(p)]
        own = [grad for p, grad in grads if id(p) in self.owners.of]
        rest = [grad for p, grad in grads if id(p) not in self.owners.of]
        # In double: ranks may have gradients of other types, or none.
        total = norm_over_ranks(own, norm_type, device, rest, torch.float64)
        total = total.to(torch.float64 if any(p.dtype == torch.float64 for p in held) else torch.float32)
        clip_to((*own, *rest), total, max_norm)
        return total

    # --- steps ---------------------------------------------------------------------------------

    def knows(self, optimizer: Optimizer) -> bool:
        return any(one is optimizer for one in self.optimizers)

    def learns(self, optimizer: Optimizer) -> bool:
        """Whether it has some of these parameters; then it is known from now on."""
        if not self.knows(optimizer) and self._of(optimizer):
            self._optimizers.append(ref(optimizer))
            self.hide_states()
        return self.knows(optimizer)

    def tell_states(self, optimizer: Optimizer, device: torch.device) -> None:
        """After a step: what has come to the states. Collective."""
        with tensors.as_plain_tensors():
            self._tell_states(optimizer, device)
        if self.stage_tensors.open:
            self.stage_tensors.add(self.states())

    def _tell_states(self, optimizer: Optimizer, device: torch.device) -> None:
        held = self._of(optimizer)
        mine = {
            i: layout
            for i, p in enumerate(held)
            if not self.foreign(p) and (layout := _layout(optimizer.state.get(p))) != self._told.get(_key(optimizer, p))
        }
        news = torch.tensor([len(mine)], device=device)
        with advising(TOGETHER):
            dist.all_reduce(news, op=dist.ReduceOp.MAX)
        if not news.item():
            return
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        for found in everybody:
            for i, layout in found.items():
                p = held[i]
                self._told[_key(optimizer, p)] = layout
                if self.foreign(p):
                    _apply(optimizer, p, layout)
        order = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        state = sorted(optimizer.state.items(), key=lambda item: order.get(id(item[0]), len(order)))
        optimizer.state.clear()  # in the order of one process on every rank: what comes home is told by its place
        optimizer.state.update(state)

    # --- pieces --------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        for tensor in self.owners.owned:
            yield tensor, self._piece(tensor, tensor)
        for optimizer in self.optimizers:
            for p in self._of(optimizer):
                for _, value in _tensors(optimizer.state.get(p)):
                    yield value, self._piece(value, p)

    def _piece(self, tensor: torch.Tensor, of: torch.Tensor) -> Piece:
        mine = not self.foreign(of)
        return OwnedTensor(partial(_itself, tensor), mine, mine, self)

    @torch.no_grad()
    def gather(self, only: list[torch.Tensor] | None = None) -> None:
        """Everything, or `only` these, is whole on every rank. Collective."""
        if self.trained:
            self.tell_gradients(self.trained[0].device)
        chosen = {id(t) for t in (self.owners.owned if only is None else only)}
        for tensor in (t for t in self.owners.owned if id(t) in chosen):
            self._spread(tensor, self.owners.of[id(tensor)])
            if tensor.grad is not None:
                if self.foreign(tensor):
                    tensor.grad = torch.empty_like(tensor)
                assert tensor.grad is not None
                dist.broadcast(_bytes(tensor.grad), self.owners.of[id(tensor)])
        for optimizer in self.optimizers:
            for p in (p for p in self._of(optimizer) if id(p) in chosen):
                for _, value in _tensors(optimizer.state.get(p)):
                    self._spread(value, self.owners.of[id(p)])

    def _spread(self, tensor: torch.Tensor, owner: int) -> None:
        """It is whole on every rank. Collective."""
        mine = owner == self.rank
        found = tensor.detach() if mine else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        found = found.contiguous()
        if found.numel():
            dist.broadcast(_bytes(found), owner)
        if not mine:
            tensor.data = found

    @torch.no_grad()
    def let_gradients_go(self) -> None:
        """Between cells a parameter that is another rank's has none here."""
        self.half = None
        for p in self.trained:
            if self.foreign(p):
                p.grad = None


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _key(optimizer: Optimizer, p: torch.Tensor) -> tuple[int, int]:
    return id(optimizer), id(p)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise NotSupported("a gradient that is not contiguous cannot be sent under pipeline: call zero_grad() first")
    return tensor.reshape(-1).view(torch.uint8)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= 1 or any(tensor.stride())


def _tensors(state: Any) -> list[tuple[Any, torch.Tensor]]:
    return [(key, value) for key, value in (state or {}).items() if isinstance(value, torch.Tensor)]


def _layout(state: Any) -> Layout:
    return (
        None
        if state is None
        else [
            (key, (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else value)
            for key, value in state.items()
        ]
    )


def _apply(optimizer: Optimizer, p: torch.Tensor, layout: Layout) -> None:
    if layout is None:
        optimizer.state.pop(p, None)
        return
    state = optimizer.state[p]
    for key in [key for key in state if key not in dict(layout)]:
        del state[key]
    for key, kind in layout:
        if not (isinstance(kind, tuple) and len(kind) == 3 and isinstance(kind[1], torch.dtype)):
            state[key] = kind
            continue
        shape, dtype, device = kind
        there = state.get(key)
        if not isinstance(there, torch.Tensor) or there.shape != shape or there.dtype != dtype:
            at = p.device if device.type == p.device.type else device
            state[key] = stand_in(torch.empty((), dtype=dtype, device=at).expand(shape))


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.optim.Optimizer.load_state_dict", "pipeline", _load_state_dict)


listening: While[StageParameters] = While(_put)
"""Those of cells that run: what a cell loads into an optimizer every rank has whole, and keeps its own of."""


def _load_state_dict(old: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = old(optimizer, *args, **kwargs)
        for stage_parameters in listening.owners:
            stage_parameters.learns(optimizer)
            stage_parameters.hide_states()
        return result

    return load_state_dict
