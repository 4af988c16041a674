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

from nbtrain.compat import autograd_engine, compiler, pytree
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.call_router import call_plainly, plain_class, route, unroute
from nbtrain.strategies.kit.stage_tensors import gathered
from nbtrain.strategies.pipeline.criterion import NamedCriterion, PendingOutput
from nbtrain.strategies.pipeline.cut_stages import StagedModel, hook_name, links
from nbtrain.strategies.pipeline.forward_program import OutOfOrder, Program, chain_program
from nbtrain.strategies.pipeline.micro_batches import BatchCut, evaluated, fits
from nbtrain.strategies.pipeline.record_forward import CannotRecord, NeedsWhole, record
from nbtrain.strategies.pipeline.run_micro_batches import MicroBatchFlow, call
from nbtrain.strategies.pipeline.same_forward import form_of
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_costs import measured

SLOWLY = (
    "pipeline: the forward of {name} cannot be divided into stages beforehand ({reason}), so its parts compute one "
    "after the other, each on its rank, and ranks wait for each other"
)
UNCUT = (
    "pipeline: what {name} returns for a batch is not what it returns for parts of it, put together (is the batch in "
    "another dimension, or does the forward look at all of it, for its loss perhaps?), so batches go through the "
    "stages uncut, and ranks wait for each other: let the batch be dimension 0 (batch_first=True), return what the "
    "loss is computed from, and compute the loss in the loop"
)
HOOKED = (
    "pipeline: {part} has a hook ({hook}), which runs on every rank, once for a batch. For that the parts of {name} "
    "compute one after the other, each on its rank, and ranks wait for each other: handle.remove(), or what a library "
    "that has put it there has for that, where the hook is not needed"
)
REPLACED = "a layer was put in or taken out, or a hook of a Sequential in it came or went, since it was divided"
TRANSFORMED = (
    "{name} was called by torch.func (vmap, grad, jacrev, ...), which under pipeline cannot look into the stages that "
    "other ranks have: give it a copy, which is whole on every rank (`whole = copy.deepcopy(model)`), or use "
    "--strategy ddp"
)
LARGE = 16
"""MB that go to every rank without a word"""
UNDIVIDED = 2
"""in the place of a plan: part by part"""
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
        move: Callable[[StagedModel, list[int]], None],
        reorder: Callable[[StagedModel, list[int]], None],
        hooked: Callable[[StagedModel], nn.Module | None],
        *,
        measure: str = "",
        loss: NamedCriterion | None = None,
    ) -> None:
        """`is_owned`: only one rank has this. `share`: every rank is to have these. `move`: stages are to be others.
        `reorder`: so are the parts, in this order. `hooked`: a module with a hook. `measure`: what the stages are still
        to be cut by, time or memory. `loss`: what `--loss` names."""
        self.staged, self.place, self.microbatches = staged, place, microbatches
        self.is_owned, self.share, self.move, self.reorder = is_owned, share, move, reorder
        self.measure, self.loss = measure, loss
        self.in_order = False
        """parts are in the order in which they are called"""
        self.name = type(staged.root).__name__
        self.programs: dict[Any, Program | None] = {}
        """by what the model is given; None: it runs part by part"""
        self.known: dict[Any, bool] = {}
        """kinds of calls that were compared: whether their batches can be cut"""
        self.on = False
        self.hooked, self.around = hooked, False
        """whether the call before went part by part, for the sake of a hook"""
        self.warned = self.told = self.hooks_told = False
        self.reason = ""
        """why it runs part by part"""
        self.new = False
        """it was found out just now what such a call does"""

    def enter(self) -> None:
        root = self.staged.root
        route(root, self._through)
        routed: Any = type(root)
        routed.forward = lambda module, *args, **kwargs: self._forward(module, args, kwargs)
        self.on = True

    def leave(self) -> None:
        if self.on:
            self.on = False
            unroute(self.staged.root)

    def _through(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Other methods run on every rank, and find the parts where they are (by_parts.py)."""
        return call_plainly(module, name, args, kwargs)

    @compiler.outside_graphs  # of `model.compile()`: what is done here is no computation, and would be looked into
    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is not self.staged.root or self.place.busy:
            return plain_class(module).forward(module, *args, **kwargs)
        if autograd_engine.in_functional_transform():
            raise NotSupported(TRANSFORMED.format(name=self.name))
        if (hooked := self.hooked(self.staged)) is not None:
            return self._around(hooked, module, args, kwargs)
        self.around = False
        if self.staged.chain and list(map(id, links(module))) != list(map(id, self.staged.parts)):
            # A layer that was replaced has no stage, nor a Sequential in it whose hook is gone.
            return self._slowly(REPLACED, module, args, kwargs)
        leaves, tree = pytree.tree_flatten(gathered((args, kwargs)))
        cut = BatchCut.of(leaves, self.microbatches, self.place.ranks)
        slices = [list(one) for one in zip(*map(cut.apply, leaves), strict=True)] or [[]]
        try:
            programs = [self._program(given, tree) for given in slices]
            if len(slices) > 1 and None not in programs and not self._fits(leaves, tree, slices, programs, cut):
                self._warn(UNCUT.format(name=self.name))
                cut, slices, programs = BatchCut([cut.batch]), [leaves], [self._program(leaves, tree)]
        except OutOfOrder as found:
            self._take_order(found.order)
            return self._forward(module, args, kwargs)
        if None in programs:
            if self.new:
                self.place.meet(self.name, leaves, UNDIVIDED)  # every rank goes this way, and none waits for a stage
                self.new = False
            return self._slowly(self.reason, module, args, kwargs)
        if self.measure and torch.is_grad_enabled():
            by, self.measure = self.measure, ""
            # none of the programs is None here
            first = MicroBatchFlow(self.place, programs[:1], slices[0], slices[:1], BatchCut(cut.sizes[:1]), self.name)  # type: ignore[arg-type]
            counts = measured(self.staged, self.place, first, by)
            if counts != self.staged.counts:
                self.move(self.staged, counts)
                self.programs.clear()
                return self._forward(module, args, kwargs)
        # none of the programs is None here
        flow = MicroBatchFlow(self.place, programs, leaves, slices, cut, self.name)  # type: ignore[arg-type]
        flow.failed = self.known.clear  # it was not seen whether what fails can be cut
        given = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        if self.loss is not None and torch.is_grad_enabled() and not given:
            return PendingOutput.of(flow, self.loss)
        returned = call(flow)
        self._tell_size(returned)
        return returned

    def _slowly(self, reason: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        returned = plain_class(module).forward(module, *args, **kwargs)
        self._warn(SLOWLY.format(name=self.name, reason=reason))  # what fails does so for its own reason
        return returned

    def _take_order(self, order: list[int]) -> None:
        """A head that was registered first is called last. Collective."""
        self.place.meet(self.name, plan=zlib.crc32(repr(order).encode()))
        self.in_order = True
        self.reorder(self.staged, order)
        self.programs.clear()

    def _fits(self, leaves: list[Any], tree: Any, slices: list[list[Any]], programs: list[Any], cut: BatchCut) -> bool:
        """Whether what comes of the micro-batches makes up what comes of the batch."""
        whole = self._program(leaves, tree)
        if whole is None:
            return True
        if not self.staged.chain and not cut.joins([one.shapes for one in programs], whole.shapes):
            return False
        kind = str(tree), tuple(leaf.dim() if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        if kind not in self.known:
            self.known[kind] = self._compared([leaves, *slices], tree, cut)
        return self.known[kind]

    def _compared(self, batches: list[list[Any]], tree: Any, cut: BatchCut) -> bool:
        root = self.staged.root
        with evaluated(root):
            programs = [self._program(given, tree) for given in batches]
            # none of the programs is None here
            return None in programs or fits(self.place, root, self.name, programs, batches, cut)  # type: ignore[arg-type]

    def _around(self, found: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Part by part, with the hook of `found` on every rank."""
        if not self.around:
            self.around = True
            self.place.meet(self.name, pytree.tree_leaves((args, kwargs)), UNDIVIDED)  # the others have it, too
            self.tell_of_hook(found)
        return plain_class(module).forward(module, *args, **kwargs)

    def tell_of_hook(self, found: nn.Module) -> None:
        if self.place.rank == 0 and not self.hooks_told:
            self.hooks_told = True
            name = next(name for name, m in self.staged.root.named_modules() if m is found)
            print(HOOKED.format(part=f"{name} ({type(found).__name__})", hook=hook_name(found), name=self.name))

    def _tell_size(self, returned: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        size = sum(t.numel() * t.element_size() for t in tensors) / 2**20
        if size > LARGE and not self.told and self.place.rank == 0:
            self.told = True
            print(
                f"what {self.name} returns, {size:.0f} MB, goes to every rank in each call: --loss with the criterion "
                "keeps it on the last"
            )

    def _program(self, given: list[Any], tree: Any) -> Program | None:
        """For one micro-batch."""
        form = None if self.staged.chain else form_of(self.staged, given, tree)
        if form in self.programs:
            return self.programs[form]
        found, self.new = self._make(given, tree), True
        if len(self.programs) >= MOST:
            self.programs.clear()
        self.programs[form] = found
        return found

    def _make(self, given: list[Any], tree: Any) -> Program | None:
        if self.staged.chain:
            if len(given) == 1:
                return chain_program(self.staged)
            self.reason = f"it is given {len(given)} things, and only one tensor can be cut and sent on"
            return None
        before, self.place.inside = self.place.inside, True
        try:
            with self.place.stage_tensors.all_plain():
                return record(self.staged, given, tree, self.is_owned)
        except NeedsWhole as error:
            tensors = error.tensors
        except CannotRecord as error:
            self.reason = str(error)
            return None
        except OutOfOrder:
            if not self.in_order:
                raise
            self.reason = "a part is given what a later stage makes"
            return None
        finally:
            self.place.inside = before
        self.place.meet(self.name, plan=zlib.crc32(repr([tuple(t.shape) for t in tensors]).encode()))
        self.share(tensors)
        return self._make(given, tree)

    def _warn(self, what: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(what, stacklevel=2)  # on every rank: where it is made an error, none goes on alone
