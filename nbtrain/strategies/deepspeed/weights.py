"""The parameters: cut into the engine's pieces, and shown as the notebook knows them.

Between cells a parameter that is in pieces, or in another precision, has the notebook's shape and dtype and one number
behind it. In a cell it is what the model computes with; `state_dict()` gives the whole under stage 3, too, where every
rank has to call it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import deepspeed as ds
from nbtrain.compat import tensors
from nbtrain.compat.modules import ASSIGNS
from nbtrain.compat.modules import parameters as parameters_of
from nbtrain.strategies.deepspeed import error_texts
from nbtrain.strategies.deepspeed.attachments import Attachments
from nbtrain.strategies.deepspeed.engine_layout import EngineLayout, SharePart, stretch
from nbtrain.strategies.deepspeed.library import COLLAPSED
from nbtrain.strategies.deepspeed.stand_ins import Outdated
from nbtrain.strategies.kit import shown_weights
from nbtrain.strategies.kit.collective_calls import told
from nbtrain.strategies.kit.memory_left_behind import Memory, leave_to_others
from nbtrain.strategies.kit.same_on_ranks import bits_summed
from nbtrain.strategies.kit.written_numbers import wrote_whole

Shapes = dict[int, tuple[torch.Size, torch.dtype]]
"""of each parameter in the notebook, by its id"""


def unreadable(p: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """In the parameter's shape, one number in memory."""
    counts = not p.is_floating_point()
    kind = p.dtype if dtype is None or counts else dtype
    return torch.full((), 0 if counts else math.nan, dtype=kind, device=p.device).expand(p.shape)


class EngineWeights:
    """The parameters of one engine. `frozen`: in full precision, what it has rounded and does not train."""

    def __init__(
        self,
        layout: EngineLayout,
        attachments: Attachments,
        shapes: Shapes,
        frozen: dict[int, torch.Tensor],
        parameters: Iterable[torch.Tensor],
    ) -> None:
        self.layout, self.attachments, self.shapes, self.frozen = layout, attachments, shapes, frozen
        self.stage = layout.stage
        self.names: dict[int, int] = {}
        """by id of a parameter, what ranks compare when they read it"""
        self.rank = dist.get_rank()  # a cell may destroy the group
        self._data: dict[int, torch.Tensor] = {}
        """what the model computes with, of those that something else stands for now"""
        self._versions: dict[int, int] = {}
        """to see what the loop has changed by hand (stage 3)"""
        self.shown_copies: dict[int, tuple[Any, list[tuple[torch.Tensor, int]]]] = {}
        """what state dicts have shown since the last step, by id of the parameter: it, and copies with their versions
        (stage 3)"""
        self._digests: list[list[torch.Tensor]] = []
        """the same, of pieces whose step is taken elsewhere (stages 1 and 2, offloaded from a GPU)"""
        for p in parameters:
            full = frozen.get(id(p)) if self.stage == 3 else None
            if full is not None:
                start, stop = stretch(vars(p))
                frozen[id(p)] = full.reshape(-1)[start:stop].clone()

    # -- showing -------------------------------------------------------------------------

    def show(self, parameters: Iterable[torch.Tensor]) -> None:
        """As the notebook knows them."""
        for p in parameters:
            shape, dtype = self.shapes[id(p)]
            if self.stage != 3 and p.dtype == dtype:
                continue
            self._data[id(p)] = p.data
            if self.stage != 3 and id(p) in self.frozen:
                _take_edited(self.frozen[id(p)], p.data)
                p.data = self.frozen[id(p)]
            else:
                p.data = torch.zeros((), dtype=dtype, device=p.device).expand(shape)

    def put_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """As the model computes with them."""
        for p in parameters:
            if (data := self._data.pop(id(p), None)) is not None:
                if self.stage != 3 and id(p) in self.frozen:
                    data.copy_(p.data)  # the notebook may have written to it
                p.data = data

    def own(self, parameters: Iterable[torch.Tensor]) -> None:
        """Before the engine goes without making parameters whole: none stays a view of its buffers."""
        for p in parameters:
            if id(p) not in self._data:
                p.data = p.data.clone()

    # -- changed by hand -----------------------------------------------------------------

    def remember(self, trained: Iterable[torch.Tensor]) -> None:
        if self.stage == 3:
            self._versions = {id(p): tensors.version(p) for p in trained}
        else:
            self._digests = [[] if flat.device == mine.device else bits_summed(mine) for flat, mine in self._halves()]

    @torch.no_grad()
    def follow_edits(self, trained: Iterable[Any]) -> None:
        """Weights that the loop has changed by hand are those that are stepped. What stage 3 has in pieces cannot be
        written to."""
        layout = self.layout
        if self.shown_copies:
            self.take_shown()
        if self.stage != 3:
            self._take_assigned()
            for number, (flat, mine) in enumerate(self._halves()):
                if flat.device != mine.device:
                    if number < len(self._digests) and all(map(torch.equal, self._digests[number], bits_summed(mine))):
                        continue
                    mine = mine.to(flat.device)
                _take_edited(flat, mine)
            return
        for p in trained:
            if tensors.version(p) != self._versions.get(id(p)) and p.ds_status.name == "AVAILABLE":
                share = layout.shares[id(p)]
                part = p.data.reshape(-1)[share.start : share.stop]
                p.ds_tensor.data[: len(part)].copy_(part)
                layout.flats[share.flat].data.narrow(0, share.at, len(part)).copy_(part)

    def _halves(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Stages 1 and 2: (what is stepped, what the model computes with) of this rank's part of each group."""
        for flat, parts in zip(self.layout.flats, self.layout.zero.parallel_partitioned_bit16_groups, strict=True):
            yield flat, parts[self.rank]

    def _take_assigned(self) -> None:
        """`p.data = other`: the engine steps and sends its own buffer, of which the parameter is a view."""
        assigned: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, flat in enumerate(ds.whole_groups(self.layout.zero)):
            for p, at in ds.in_order(self.layout.zero, number):
                if p.numel() and p.data_ptr() != flat.data_ptr() + at * flat.element_size():
                    assigned.append((p, flat.narrow(0, at, p.numel()).view(p.shape)))
        if assigned:
            known = [*ds.whole_groups(self.layout.zero), *(mine for _, mine in self._halves())]
            leave_to_others([own for _, own in assigned], known)
        for p, own in assigned:
            own.copy_(p.data)
            p.data = own

    # -- pieces --------------------------------------------------------------------------

    def pieces(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, SharePart]]:
        for p in parameters:
            piece = self._piece(p)
            if piece is not None:
                piece.everywhere = self.stage != 3 and id(p) not in self._data
                yield p, piece

    @torch.no_grad()
    def load(self, p: Any, full: torch.Tensor) -> None:
        """In a cell, under stage 3."""
        piece = self._piece(p)
        assert piece is not None
        with tensors.as_plain_tensors():
            piece.fill(full)
            if self.is_gathered(p):
                p.data.copy_(full)
            _, copies = self.shown_copies.get(id(p), (p, []))
            for at, (tensor, _) in enumerate(copies):
                tensor.copy_(full)
                copies[at] = tensor, tensors.version(tensor)

    def take_shown(self) -> None:
        """What was written to the tensors of a state dict is the model's, as in one process, where they are its own."""
        for p, _ in self.shown_copies.values():
            self._take_shown_of(p)

    def _take_shown_of(self, p: Any) -> None:
        _, copies = self.shown_copies.get(id(p), (p, []))
        for tensor, version in copies[:]:
            if tensors.version(tensor) != version:
                wrote_whole([tensor])
                self.load(p, tensor.detach())
                return  # and so are the others

    def stepped(self) -> None:
        """The model goes on without what state dicts have shown, and to use it is refused."""
        tensors.become((tensor for _, copies in self.shown_copies.values() for tensor, _ in copies), Outdated)
        self.shown_copies.clear()

    def is_gathered(self, p: Any) -> bool:
        return bool(self.attachments.of(p)["ds_status"].name == "AVAILABLE")

    def is_on_its_way(self, p: Any) -> bool:
        """DeepSpeed gathers it ahead of its layer's forward."""
        return bool(self.attachments.of(p)["ds_status"].name == "INFLIGHT")

    @torch.no_grad()
    def whole(self, p: Any) -> torch.Tensor:
        """In a cell, under stage 3: the parameter's own memory if it is there, else gathered. Collective."""
        with tensors.as_plain_tensors():
            self._take_shown_of(p)
            if self.is_gathered(p):
                there: torch.Tensor = p.detach()
                return there
            piece = self._piece(p)
            assert piece is not None
            size: int = self.attachments.of(p)["ds_tensor"].ds_numel
            mine = torch.zeros(size, dtype=p.dtype, device=p.device)
            for (start, stop), part in zip(piece.ranges(), piece.read(), strict=True):
                mine[: stop - start].copy_(part)
            flat = torch.empty(size * dist.get_world_size(), dtype=p.dtype, device=p.device)
            with told(self.names.get(id(p), 0)):
                dist.all_gather_into_tensor(flat, mine)
            return flat[: p.numel()].view(p.shape)

    def hook_state_dicts(self, models: Iterable[nn.Module]) -> list[Any]:
        """For a cell, under stage 3: a model's `state_dict()` gathers one parameter at a time, into main memory; what
        is loaded goes into the pieces, as torch would write into what only stands for a parameter. Returns handles."""
        loaded: set[str] = set()
        latest: dict[int, tuple[str, ref[torch.Tensor]]] = {}
        """by id of a parameter, its name and copy in the latest state dict"""

        @torch.inference_mode(False)  # what is made in it has no version
        def fill(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for name, p in parameters_of(module).items():
                if p is not None and prefix + name in state and hasattr(p, COLLAPSED):
                    before, copy = latest.get(id(p), ("", lambda: None))
                    if state.get(before) is (tied := copy()) and tied is not None:
                        state[prefix + name] = tied.detach()  # as torch has it: another tensor of the same memory
                        shown_weights.note(state[prefix + name], p)
                        continue
                    shown = state[prefix + name] = self.whole(p).to("cpu", copy=True)
                    latest[id(p)] = prefix + name, ref(shown)
                    _, copies = self.shown_copies.setdefault(id(p), (p, []))
                    copies.append((shown, tensors.version(shown)))
                    shown_weights.note(shown, p)
                    Memory([(prefix + name, shown)]).left()

        def take(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
            *_, errors = others
            if others[0].get(ASSIGNS):
                raise NotSupported(error_texts.ASSIGNED)
            for name, p in parameters_of(module).items():
                key = prefix + name
                if p is None or not hasattr(p, COLLAPSED) or key not in state:
                    continue
                whole = state.pop(key)
                if type(whole) not in (torch.Tensor, nn.Parameter):  # it shows another weight
                    whole = copy.deepcopy(whole)
                loaded.add(key)
                wrote_whole([whole])
                if whole.shape == p.shape:
                    self.load(p, whole.detach())
                else:
                    errors.append(f"size mismatch for {key}: {tuple(whole.shape)} is loaded into {tuple(p.shape)}")

        def settle(module: nn.Module, found: Any) -> None:
            found.missing_keys[:] = [key for key in found.missing_keys if key not in loaded]
            loaded.clear()

        parts = list({id(part): part for model in models for part in model.modules() if parameters_of(part)}.values())
        return [
            *(part.register_state_dict_post_hook(fill) for part in parts),
            *(part.register_load_state_dict_pre_hook(take) for part in parts),
            *(part.register_load_state_dict_post_hook(settle) for part in parts),
        ]

    def _piece(self, p: Any) -> SharePart | None:
        shape, dtype = self.shapes[id(p)]
        share = self.layout.shares.get(id(p))
        if share is None:
            return self._frozen_piece(p) if self.stage == 3 else None
        piece = self.layout.piece(
            share, shape, dtype, lambda: self.layout.flats[share.flat].data, partial(self._fill_model, p)
        )
        piece.everywhere = self.stage != 3 and p.dtype == dtype
        return piece

    def _frozen_piece(self, p: Any) -> SharePart:
        """Stage 3 cuts these up, too."""
        shape, dtype = self.shapes[id(p)]
        attributes = self.attachments.of(p)
        piece, start, stop = attributes["ds_tensor"], *stretch(attributes)

        def read() -> torch.Tensor:
            kept = self.frozen.get(id(p))
            return kept if kept is not None else piece.data[: stop - start]

        def fill(full: torch.Tensor) -> None:
            if id(p) in self.frozen:
                self.frozen[id(p)].copy_(full[start:stop])
            self._fill_model(p, full)

        return SharePart(shape, dtype, (start, stop), read, fill, self.layout.cut)

    def _fill_model(self, p: Any, full: torch.Tensor) -> None:
        """What the model computes with."""
        data = self._data.get(id(p), p.data)
        if self.stage == 3:
            attributes = self.attachments.of(p)
            start, stop = stretch(attributes)
            if attributes["ds_tensor"].numel():
                attributes["ds_tensor"].data[: stop - start].copy_(full[start:stop])
            if not attributes.get("ds_persist") or attributes["ds_status"].name != "AVAILABLE":
                return
        data.copy_(full.view(data.shape))


def _take_edited(flat: torch.Tensor, mine: torch.Tensor) -> None:
    """What was not changed by hand keeps its 32 bits, which the model's 16 are rounded from."""
    if flat.dtype == mine.dtype:
        flat.data.copy_(mine)
        return
    rounded = flat.data.to(mine.dtype)
    if not torch.equal(rounded, mine):
        flat.data.copy_(torch.where(rounded == mine, flat.data, mine.to(flat.dtype)))
