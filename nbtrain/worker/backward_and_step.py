"""Calls the strategy, accumulation and loss scaling around a backward, gradient clipping and an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RankInfo
from nbtrain.compat import autograd_engine
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.base import Shards, Strategy
from nbtrain.strategies.kit.call_arguments import kept, listed, scaled_starts, with_closure
from nbtrain.strategies.kit.clipping import clip_norm
from nbtrain.strategies.kit.gradient_average import open_averages
from nbtrain.worker.data.loaders import Loaders
from nbtrain.worker.gradients.by_autograd_grad import AutogradGradients
from nbtrain.worker.gradients.gradients_between_cells import GradientsBetweenCells
from nbtrain.worker.gradients.redundant_work import RedundantWork
from nbtrain.worker.gradients.summed_losses import SummedLosses
from nbtrain.worker.loop.learning_rate import ScaledRate
from nbtrain.worker.loop.shared_board import BACKWARD, STEP
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.measure import phases
from nbtrain.worker.measure.phases import PhaseTimer
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.random_states.rank_random_states import Randomness
from nbtrain.worker.ranks import collectives
from nbtrain.worker.ranks.loop_fixes import BATCH_NORM, BatchNorms
from nbtrain.worker.ranks.training_threads import TrainingThreads
from nbtrain.worker.setup import whole
from nbtrain.worker.setup.components import Components

if TYPE_CHECKING:
    from nbtrain.worker.loop.accumulation import Accumulation
    from nbtrain.worker.measure.step_record import StepRecord
    from nbtrain.worker.precision.loss_scaling import LossScaling

NO_GRAPH = (
    "loss.backward(create_graph=True): under {} p.grad keeps no graph, so a penalty made of it would have no gradient; "
    "--strategy ddp and --strategy zero1 keep it"
)
ACCUMULATED = (
    "a gradient of weights that is differentiated again (create_graph=True) is that of one small batch of several that "
    "--accumulate adds up, and a penalty made of it would not be one process's: leave the option out. A penalty on the "
    "gradient of the input, torch.autograd.grad(…, x, create_graph=True), works with it"
)
SCALER = (
    "a GradScaler of your own does not know which steps --accumulate leaves out: leave the scaler out and write "
    "--precision 16-mixed, or leave the option out and call step() and update() every few batches yourself"
)


class BackwardAndStep(Part):
    """A rank's listeners to backward, clipping and step."""

    def __init__(
        self,
        info: RankInfo,
        strategy: Strategy,
        components: Components,
        steps: Steps,
        phases: PhaseTimer,
        randomness: Randomness,
        scaling: LossScaling | None,
        threads: TrainingThreads,
        loaders: Loaders,
        rate: ScaledRate,
    ) -> None:
        self.threads = threads
        self.info = info
        self.strategy = strategy
        self.components = components
        self.steps = steps
        self.phases = phases
        self.randomness = randomness
        self.scaling = scaling
        self.accumulation: Accumulation | None = None
        self.record: StepRecord | None = None
        self.redundant_work = RedundantWork()
        self.gradients_between_cells = GradientsBetweenCells()
        self.loaders, self.rate = loaders, rate
        loaders.on_own_batches = self.redundant_work.shared
        self.summed_losses = SummedLosses()
        self.autograd_gradients = AutogradGradients()
        self.running = False
        self.ran_backward = False
        """in this cell"""
        self.batch_norms = BatchNorms()
        self.trains_batch_norm = False
        """the first backward of a cell found batch norms in training mode"""
        self._in_backward = False
        self._in_step = False
        """some strategies reduce gradients in the step and not in the backward"""

    def listen(self, listeners: Listeners) -> None:
        listeners.listen("torch.autograd.backward", "step", self._backward)
        listeners.listen("torch.autograd.grad", "step", self._grad)
        listeners.listen("torch.nn.utils.clip_grad_norm_", "step", self._clip_norm)
        listeners.listen("torch.nn.utils.clip_grad_value_", "step", self._clip_value)
        listeners.listen("torch.amp.GradScaler.scale", "step", self._scaler_scale)
        listeners.listen("torch.amp.GradScaler.step", "step", self._scaler_step)
        listeners.hook(register_optimizer_step_pre_hook(self._before_step))
        listeners.hook(register_optimizer_step_post_hook(self._after_step))

    def begin(self, cell: Cell) -> None:
        self.running, self.ran_backward, self.record = True, False, cell.record
        for_all = cell.run.ranks is None and cell.run.trial is None
        self.redundant_work.begin(cell.sharing > 1 and cell.run.trial is None)
        self.summed_losses.begin(cell.sharing, cell.run.split_batches)
        self.autograd_gradients.begin(cell.several and for_all)
        if cell.run.accumulate > 1:
            from nbtrain.worker.loop.accumulation import Accumulation

            self.accumulation = Accumulation(
                cell.run.accumulate, lambda: self.steps.at_last_batch, lambda: self.components.prepared
            )
            self.accumulation.enter(cell.optimizers)
        if cell.trial is not None:  # it may switch dropout off in models, which are set up
            cell.trial.begin(self.steps)

    def end(self, ok: bool) -> list[str]:
        said = self.gradients_between_cells.end()
        self.running = self._in_backward = self._in_step = False
        self.record = None
        self.autograd_gradients.end()
        accumulation, self.accumulation = self.accumulation, None
        left_out = [] if accumulation is None else accumulation.leave()
        summed = self.summed_losses.notes() if self.loaders.evaluations.dealt else []
        return [*(left_out if ok else ()), *summed, *said]

    def advice(self, names: Mapping[str, object], stepped: bool) -> dict[str, str]:
        several = self.info.world_size > 1 and self.loaders.gave_shares
        normalises = several and stepped and self.trains_batch_norm
        return {**self.gradients_between_cells.advice, **({"batch norm": BATCH_NORM} if normalises else {})}

    def compared(self) -> dict[str, int]:
        work = self.redundant_work.number()
        compared = {**self.summed_losses.divisors(), **self.autograd_gradients.numbers()}
        return {**compared, "work": work} if work else compared

    def within(self) -> int:
        """BACKWARD, STEP or 0: what the rank is in the middle of."""
        return BACKWARD if self._in_backward else STEP if self._in_step else 0

    def made(self, optimizers: Iterable[Optimizer]) -> None:
        """The cell has made these, and maybe models for them."""
        if self.scaling is not None:
            self.scaling.look_again()
        if self.accumulation is not None:
            for optimizer in optimizers:
                self.accumulation.gate(optimizer)

    # --- what torch calls ------------------------------------------------------------------------

    def _backward(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Checkpointed layers run backwards inside of backwards.
            if not self.running or (self._in_backward and autograd_engine.in_backward()):
                return old(tensors, grad_tensors, *args, **kwargs)
            if whole.open_blocks or whole.taken_gradients:
                whole.refuse("loss.backward()")
            if get_ident() != self.threads.known or self.threads.refused is not None:
                self.threads.enter()
            if not self.ran_backward:
                self.ran_backward = True
                self.trains_batch_norm = self.trains_batch_norm or self.batch_norms.train(self.components.prepared)
            if kwargs.get("create_graph", args[1] if len(args) > 1 else False):
                self._refuse_graphs()
            if self.gradients_between_cells.waiting:
                self.gradients_between_cells.backward()
            self.randomness.apart()
            self.steps.backward()
            self._look_at_loss(tensors, grad_tensors)
            if self.record is not None:
                self.record.loss(tensors)
            if self.redundant_work.on:
                self.redundant_work.backward(tensors)
            self._in_backward, self._in_step = True, False  # a step before may have failed
            self.phases.mark(phases.BACKWARD)
            run = old if self.scaling is None else self.scaling.backward(old)
            try:
                with ExitStack() as around:
                    # One loss may go through several models; a strategy scales it alike for all of them.
                    sync = self.accumulation is None or self.accumulation.due
                    shares = [around.enter_context(prepared.backward(sync)) for prepared in self.components.prepared]
                    share = next((other for other in shares if other != 1.0), 1.0)
                    if self.accumulation is not None:
                        share *= self.accumulation.share()
                    if share != 1.0:
                        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                        grad_tensors = scaled_starts(roots, grad_tensors, share) or grad_tensors
                    return run(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._in_backward = False
                self.phases.mark(phases.UNDECIDED)
                if self.autograd_gradients.open:
                    self.autograd_gradients.backward_ended()

        return backward

    def _refuse_graphs(self) -> None:
        """Raise where `p.grad` would have no graph, or that of one batch of several."""
        if self.accumulation is not None:
            raise NotSupported(ACCUMULATED)
        if any(not prepared.promises.keeps_graphs for prepared in self.components.prepared):
            raise NotSupported(NO_GRAPH.format(type(self.strategy).__name__.lower()))

    def _look_at_loss(self, losses: Any, starts: Any) -> None:
        """Whether it is a sum, where gradients are averaged."""
        if self.steps.batch and self.summed_losses.due():
            shapes = {p.shape for prepared in self.components.prepared for p in prepared.component.parameters()}
            self.summed_losses.look(losses, self.steps.batch, shapes, starts)

    def _has_weights(self, tensors: Sequence[Any]) -> bool:
        ids = {id(p) for prepared in self.components.prepared for p in prepared.component.parameters()}
        return any(id(tensor) in ids for tensor in tensors)

    def _grad(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.running or self._in_backward:
                return old(outputs, inputs, *args, **kwargs)
            self.ran_backward = True
            inputs, outputs = kept(inputs), kept(outputs)
            again = bool(kwargs.get("create_graph", args[2] if len(args) > 2 else False))
            inputs_listed = listed(inputs)
            if again and self.accumulation is not None and self._has_weights(inputs_listed):
                raise NotSupported(ACCUMULATED)
            if any(map(is_divided, inputs_listed)):  # these are averaged
                self._look_at_loss(outputs, args[0] if args else kwargs.get("grad_outputs"))
            gradients = old(outputs, inputs, *args, **kwargs)
            own = listed(gradients)
            given: Sequence[Any] = own
            for average in open_averages:
                given = average.differentiated(listed(outputs), inputs_listed, given)
            if given is not own:
                gradients = dict(zip(gradients, given, strict=True)) if isinstance(gradients, dict) else tuple(given)
            self.autograd_gradients.asked(inputs_listed, listed(gradients), again)
            return gradients

        return grad

    def _clip_norm(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def clip(
            parameters: Any,
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            if not self.running or whole.open_blocks:
                return old(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            tensors, kind = self._to_clip(parameters), float(norm_type)
            if self.accumulation is not None and not self.accumulation.due:
                # Only the sum of the group is clipped, or is to be finite; the norm so far is returned.
                by_torch = partial(old, tensors, float("inf"), kind, False, foreach)
                return clip_norm(self.components.prepared, tensors, None, kind, False, by_torch)
            by_torch = partial(old, tensors, max_norm, kind, error_if_nonfinite, foreach)
            return clip_norm(self.components.prepared, tensors, float(max_norm), kind, error_if_nonfinite, by_torch)

        return clip

    def _clip_value(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if whole.open_blocks:
                return old(parameters, *args, **kwargs)
            if self.running and self.accumulation is not None and not self.accumulation.due:
                return None
            if self.running:
                parameters = self._to_clip(parameters)
                for prepared in self.components.prepared:
                    if isinstance(prepared, Shards):
                        prepared.clip(parameters, inf, None)
                    else:
                        prepared.complete_gradients(parameters)
            return old(parameters, *args, **kwargs)

        return clip

    def settle(self) -> None:
        """Before gradients are read: those that `torch.autograd.grad` has found are averaged where that is due."""
        if self.autograd_gradients.open:
            self.autograd_gradients.settle()

    def _to_clip(self, parameters: Any) -> list[torch.Tensor]:
        self.settle()
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.running:
            return None
        if self.threads.refused is not None:
            self.threads.check()
        if self._in_backward:  # in a hook, as soon as a gradient is there
            self.phases.resume(phases.OPTIMIZER)
        else:
            self.phases.mark(phases.OPTIMIZER)
        if self.rate.factor != 1:
            self.rate.before_step(optimizer)
        if whole.open_blocks or whole.taken_gradients:
            whole.refuse("optimizer.step()")
        if self.autograd_gradients.open:
            self.autograd_gradients.settle()
        several = self.info.world_size > 1 and not self.strategy.facts.hands_off
        if several:
            self.components.guard(optimizer)
        if self.accumulation is not None:
            self.accumulation.check(optimizer)
        arguments = self.scaling.before_step(optimizer, args, kwargs) if self.scaling is not None else None
        for around in (partial(self._common, optimizer), self._timed) if several else (self._timed,):
            arguments = with_closure(*(arguments or (args, kwargs)), around) or arguments
        self._in_step = several
        return arguments

    def _timed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose time counts as forward, not as optimizer."""

        def timed() -> Any:
            self.phases.mark(phases.FORWARD)
            try:
                return closure()
            finally:
                self.phases.mark(phases.OPTIMIZER)

        return timed

    def _common(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that returns the mean of the ranks' losses. LBFGS decides by the loss when to stop its search: by
        their own losses ranks would stop at different points, and hang. What it trains has gradients only now."""

        def common() -> Any:
            loss = closure()
            self.components.guard(optimizer)
            return collectives.reduce(loss) if isinstance(loss, (torch.Tensor, float)) else loss

        return common

    def _scaler_scale(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if self.running and self.accumulation is not None and scaler.is_enabled():
                raise NotSupported(SCALER)
            if self.running and self.strategy.facts.own_precision and scaler.is_enabled():
                raise NotSupported(
                    f"a GradScaler of your own cannot see the gradients under {type(self.strategy).__name__}, which "
                    "scales losses by itself: leave the scaler out and write --precision 16-mixed, or take "
                    "--strategy ddp"
                )
            return old(scaler, *args, **kwargs)

        return scale

    def _scaler_step(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self.steps.calls
            if self.running:
                self.settle()  # it divides gradients by its scale
            result = old(scaler, optimizer, *args, **kwargs)
            if self.running and self.steps.calls == before:
                self.steps.passed_over(optimizer)
            return result

        return step

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.running:
            return
        self._in_step = False
        if self.gradients_between_cells.waiting:  # not before: a closure may clear gradients
            self.gradients_between_cells.stepped(optimizer)
        if self.rate.factor != 1:
            self.rate.after_step(optimizer)
        if self._in_backward:
            self.phases.resume(phases.BACKWARD)
        else:
            self.phases.mark(phases.UNDECIDED)
        if self.scaling is not None and self.scaling.after_step(optimizer):
            self.steps.passed_over(optimizer)
        else:
            self.steps.stepped(optimizer)
