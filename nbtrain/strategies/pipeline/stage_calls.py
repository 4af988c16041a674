"""What becomes of a call of a model while a cell runs: its forward goes through the stages.

The model's class is a subclass of its own meanwhile, whose `forward` is the pipeline's. So `model(x)`, its hooks and
what `--precision` does around it are the same on every rank, and `model.forward(x)` is no way past it.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import compiler, pytree
from nbtrain.strategies.kit import functional_transforms
from nbtrain.strategies.kit.call_router import call_plainly, plain_class, route, unroute
from nbtrain.strategies.kit.stage_tensors import with_full_stage_tensors
from nbtrain.strategies.pipeline.cut_stages import ModuleHooks, StagedModel, hook_name, links
from nbtrain.strategies.pipeline.forward_program import OutOfOrder, Program, chain_program
from nbtrain.strategies.pipeline.kept_by_hooks import tell
from nbtrain.strategies.pipeline.micro_batches import BatchCut, evaluated, fits
from nbtrain.strategies.pipeline.record_forward import CannotRecord, NeedsWhole, OwnError, Replaced, record
from nbtrain.strategies.pipeline.run_micro_batches import MicroBatchFlow, call
from nbtrain.strategies.pipeline.same_forward import form_of
from nbtrain.strategies.pipeline.stage import StagePlace

UNDIVIDED = (
    "the forward of {name} cannot be divided into stages{where}: {reason}. --strategy fsdp runs it as it is{evaluated}"
)
EVALUATED = "; to evaluate it here, write `with whole(model), torch.no_grad():`"
UNCUT = (
    "pipeline: what {name} returns for a batch is not what it returns for parts of it, put together (is the batch in "
    "another dimension, or does the forward look at all of it, for its loss perhaps?), so batches go through the "
    "stages uncut, and ranks wait for each other: let the batch be dimension 0 (batch_first=True), return what the "
    "loss is computed from, and compute the loss in the loop"
)
HOOKED = (
    "pipeline: {part} has a hook ({hook}), which runs on every rank, once for a batch. For that every rank computes "
    "all of {name}, with the time and the memory of one process: handle.remove(), or what a library that has put it "
    "there has for that, where the hook is not needed; --strategy fsdp where it is"
)
REPLACED = (
    "a layer of {name} was put in or taken out, or a weight tied, since it was cut into stages. Do it where all of the "
    "model is there: `with whole(model, optimizer): model[4] = nn.Linear(8, 3)`, with a new optimizer in the same block"
)
AROUND = 2
"""in the place of a plan: on every rank, for the sake of a hook"""
MOST = 64
"""programs that are kept of a model"""


class StageCalls:
    """Sends calls of one model through its stages, while a cell runs."""

    def __init__(
        self,
        staged: StagedModel,
        place: StagePlace,
        microbatches: int,
        is_owned: Callable[[torch.Tensor], bool],
        share: Callable[[list[torch.Tensor]], None],
        reorder: Callable[[StagedModel, list[int]], None],
        cut_otherwise: Callable[[], bool],
    ) -> None:
        """`is_owned`: only one rank has this. `share`: every rank is to have these. `reorder`: the parts are to be
        in this order. `cut_otherwise`: whether layers have other weights than when they were cut."""
        self.cut_otherwise = cut_otherwise
        self.staged, self.place, self.microbatches = staged, place, microbatches
        self.is_owned, self.share, self.reorder = is_owned, share, reorder
        self.in_order = False
        """parts are in the order in which they are called"""
        self.name = type(staged.root).__name__
        self.programs: dict[Any, Program] = {}
        """by what the model is given"""
        self.known: dict[Any, bool] = {}
        """kinds of calls that were compared: whether their batches can be cut"""
        self.on = False
        self.hooks, self.around = ModuleHooks(staged.root), False
        """whether the call before was computed by every rank, for the sake of a hook"""
        self.warned = self.hooks_told = False

    def enter(self) -> None:
        root = self.staged.root
        self.hooks = ModuleHooks(root)
        route(root, self._through)
        routed: Any = type(root)
        routed.forward = lambda module, *args, **kwargs: self._forward(module, args, kwargs)
        self.on = True

    def leave(self) -> None:
        if self.on:
            self.on = False
            unroute(self.staged.root)

    def _through(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Other methods run on every rank."""
        return call_plainly(module, name, args, kwargs)

    @compiler.outside_graphs  # of `model.compile()`: what is done here is no computation, and would be looked into
    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is not self.staged.root or self.place.busy:
            return plain_class(module).forward(module, *args, **kwargs)
        functional_transforms.refuse_call(self.name, "under pipeline")
        if (hooked := self.hooks.look()) is not None:
            return self._around(hooked, module, args, kwargs)
        self.around = False
        if self.staged.chain and list(map(id, links(module))) != list(map(id, self.staged.parts)):
            raise NotSupported(REPLACED.format(name=self.name))
        leaves, tree = pytree.tree_flatten(with_full_stage_tensors((args, kwargs)))
        try:
            cut, slices, programs = self._cut(leaves, tree)
        except OutOfOrder as out_of_order:
            self._take_order(out_of_order.order)
            return self._forward(module, args, kwargs)
        except Replaced:
            raise NotSupported(REPLACED.format(name=self.name)) from None
        except CannotRecord as error:
            if isinstance(error, OwnError):  # where it does so with numbers, too, that is what the cell is to see
                self._whole(module, args, kwargs)
            line = "" if torch.is_grad_enabled() and self.staged.root.training else EVALUATED
            raise NotSupported(
                UNDIVIDED.format(name=self.name, where=error.where, reason=error, evaluated=line)
            ) from None
        flow = MicroBatchFlow(self.place, programs, leaves, slices, cut, self.name)
        flow.failed = self._failed
        programs[0].begin()
        returned = call(flow)
        if self.hooks.computing:
            tell(self.hooks.computing, self.staged, self.place)
        return returned

    def _failed(self) -> None:
        """Called on every rank, before the failure of a stage is raised."""
        self.known.clear()  # it was not seen whether what fails can be cut
        if self.cut_otherwise():
            raise NotSupported(REPLACED.format(name=self.name))

    def _take_order(self, order: list[int]) -> None:
        """A head that was registered first is called last. Collective."""
        self.place.meet(self.name, plan=zlib.crc32(repr(order).encode()))
        self.in_order = True
        self.reorder(self.staged, order)
        self.programs.clear()

    def _cut(self, leaves: list[Any], tree: Any) -> tuple[BatchCut, list[list[Any]], list[Program]]:
        """How the batch is cut, its micro-batches, and what is done with each."""
        cut = BatchCut.of(leaves, self.microbatches, self.place.ranks)
        slices = [list(parts) for parts in zip(*map(cut.apply, leaves), strict=True)] or [[]]
        if len(slices) == 1:
            return cut, slices, [self._program(leaves, tree)]
        kind = str(tree), tuple(leaf.dim() if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        if self.known.get(kind, True):
            try:
                programs = [self._program(given, tree) for given in slices]
                if self._fits(leaves, tree, slices, programs, cut, kind):
                    return cut, slices, programs
            except OwnError:  # of a part of the batch
                self._program(leaves, tree)
                self.known[kind] = False
        self._warn(UNCUT.format(name=self.name))
        return BatchCut([cut.batch]), [leaves], [self._program(leaves, tree)]

    def _fits(
        self, leaves: list[Any], tree: Any, slices: list[list[Any]], programs: list[Any], cut: BatchCut, kind: Any
    ) -> bool:
        """Whether what comes of the micro-batches makes up what comes of the batch."""
        full_program = self._program(leaves, tree)
        if not self.staged.chain and not cut.joins([program.shapes for program in programs], full_program.shapes):
            return False
        if kind not in self.known:
            self.known[kind] = self._compared([leaves, *slices], tree, cut)
        return self.known[kind]

    def _compared(self, batches: list[list[Any]], tree: Any, cut: BatchCut) -> bool:
        root = self.staged.root
        with evaluated(root):
            try:
                programs = [self._program(given, tree) for given in batches]
            except CannotRecord:  # what it does in training is looked at alone
                return True
            return fits(self.place, root, self.name, programs, batches, cut)

    def _around(self, part: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On every rank, with the hook of `found`."""
        if not self.around:
            self.around = True
            self.place.meet(self.name, pytree.tree_leaves((args, kwargs)), AROUND)  # the others have it, too
            if self.place.rank == 0 and not self.hooks_told:
                self.hooks_told = True
                name = next(name for name, m in self.staged.root.named_modules() if m is part)
                print(HOOKED.format(part=f"{name} ({type(part).__name__})", hook=hook_name(part), name=self.name))
        return self._whole(module, args, kwargs)

    def _whole(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.place.computing_everywhere():
            return plain_class(module).forward(module, *args, **kwargs)

    def _program(self, given: list[Any], tree: Any) -> Program:
        """For one micro-batch."""
        mode = self.staged.root.training, torch.is_grad_enabled()
        form = mode if self.staged.chain else form_of(self.staged, given, tree)
        if form in self.programs:
            return self.programs[form]
        program = self._make(given, tree)
        if len(self.programs) >= MOST:
            self.programs.clear()
        self.programs[form] = program
        return program

    def _make(self, given: list[Any], tree: Any) -> Program:
        if self.staged.chain:
            if len(given) == 1:
                return chain_program(self.staged)
            raise CannotRecord(f"it is given {len(given)} things, and only one tensor can be cut and sent on")
        before, self.place.inside = self.place.inside, True
        try:
            with self.place.stage_tensors.all_plain():
                return record(self.staged, given, tree, self.is_owned)
        except NeedsWhole as error:
            tensors = error.tensors
        except OutOfOrder:
            if not self.in_order:
                raise
            raise CannotRecord("a part is given what a later stage makes") from None
        finally:
            self.place.inside = before
        self.place.meet(self.name, plan=zlib.crc32(repr([tuple(t.shape) for t in tensors]).encode()))
        self.share(tensors)
        return self._make(given, tree)

    def _warn(self, what: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(what, stacklevel=2)  # on every rank: where it is made an error, none goes on alone
