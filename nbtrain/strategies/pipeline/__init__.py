"""`pipeline`: each rank holds some layers of a model, a stage; every batch goes through all of them, cut into
micro-batches, so that the stages work at the same time.

The loop is the plain one, on every rank: all see the same batches, the output of the last stage goes to all of them,
and each computes the same loss, whose backward runs the stages the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.compat import layers, tensors
from nbtrain.strategies.base import Component, Facts, Piece, Prepared, Promises, Shards, Strategy, is_lazy
from nbtrain.strategies.kit.call_arguments import with_closure
from nbtrain.strategies.kit.component_tensors import added, buffers_of, optimized
from nbtrain.strategies.kit.named_tensors import owners
from nbtrain.strategies.kit.per_parameter_optimizers import steps_each_alone, why_whole
from nbtrain.strategies.kit.replicated import replicas_of
from nbtrain.strategies.kit.sharded_state import ShardedState
from nbtrain.strategies.kit.step_hooks import StepHooks
from nbtrain.strategies.kit.units_to_wrap import called_by_loops, outermost
from nbtrain.strategies.memory_estimate import Estimate, Profile, World
from nbtrain.strategies.pipeline.autograd_calls import AutogradCalls
from nbtrain.strategies.pipeline.cut_stages import Owners, StagedModel, cut_evenly, cut_models, find_owners, size
from nbtrain.strategies.pipeline.estimate import estimate
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_calls import StageCalls
from nbtrain.strategies.pipeline.stage_messages import advising, is_everywhere
from nbtrain.strategies.pipeline.stage_parameters import StageParameters
from nbtrain.strategies.pipeline.tied_gradients import TiedGradients

KEPT = "_nbtrain_staged"
MIDST = (
    "save(), load(), setup() or whole() in the middle of a model's forward or backward, where under pipeline its "
    "stages are at work: write it between loss.backward() and the next forward, or take --strategy ddp"
)
ONE_RANK = (
    "SyncBatchNorm asks all ranks for their share of a batch, and under pipeline one rank alone has the layer: leave "
    "it a BatchNorm (--microbatches 1 gives it whole batches), or use --strategy ddp"
)
TOGETHER = (
    "Under pipeline every rank steps, after a backward on every rank: in place of leaving a backward out on one of "
    "them write `(loss * 0).backward()` on all, or use --strategy ddp"
)
ONE_VECTOR = (
    "LBFGS works on one vector of all parameters, and under pipeline each rank has those of its own stage. --strategy "
    "fsdp can"
)


class PipelineComponent(Shards):
    """A component whose models are in stages."""

    promises = Promises(hooks_see_means=True, keeps_graphs=True)

    def __init__(self, component: Component, options: Pipeline.Options) -> None:
        super().__init__(component)
        self.options = options
        _check(component)
        device = next((p.device for p in component.parameters()), torch.device("cpu"))
        self.place = StagePlace(device)
        roots = outermost(called_by_loops(component.modules.values()))
        self.staged_models, small = cut_models(roots, self.place.ranks, options.balance, bool(component.optimizers))
        for model in small:
            self.notes.append(f"{type(model).__name__} has too few parts for stages: every rank has all of it")
        self.promoted: set[int] = set()
        self.calls = [
            StageCalls(
                staged,
                self.place,
                options.microbatches,
                lambda t: id(t) in self.owners.of,
                self._share,
                self._reorder,
                self._cut_otherwise,
            )
            for staged in self.staged_models
        ]
        self.entered = False
        models = [staged.root for staged in self.staged_models]
        self.autograd = AutogradCalls(component.parameters(), self.place, models)
        self.stage_tensors = self.place.stage_tensors
        self.steps: list[tuple[torch.optim.Optimizer, ExitStack]] = []
        """what ends with a step that is under way"""
        self.state = ShardedState("pipeline", lambda p: self.owners.of.get(id(p)))
        self.step_hooks = StepHooks(self._before_step, self._after_step, self._loaded)
        self.changed = False
        """an optimizer's options, since its last step"""
        self.notes += why_whole(component.optimizers.values())
        self._hold()
        self._describe()

    def _hold(self) -> None:
        """As the models are cut now."""
        component, place = self.component, self.place
        self.owners = self._find_owners()
        self.stage_parameters = StageParameters(self.owners, place.rank, self.stage_tensors)
        self.stage_parameters.hide()
        for optimizer in self._divided():
            self.state.cut(optimizer)
        foreign = [p for p in component.parameters() if self.stage_parameters.foreign(p)]
        own = [p for p in component.parameters() if not self.stage_parameters.foreign(p)]
        self.shared = TiedGradients(self.owners.shared, foreign, own, place)

    def _find_owners(self) -> Owners:
        component = self.component
        return find_owners(self.staged_models, component.parameters(), buffers_of(component), self.promoted)

    def _cut_otherwise(self) -> bool:
        """Whether weights were tied, put in or taken out since the models were cut."""
        now = self._find_owners()
        return any(now.of.get(id(p)) != self.owners.of.get(id(p)) for p in self.component.parameters())

    def _divided(self) -> list[torch.optim.Optimizer]:
        """What torch's own optimizers do to a parameter depends on no other: each rank steps those of its stage. Of
        anybody else's nobody knows (kit/per_parameter_optimizers.py), so that they read and write on all ranks."""
        return [optimizer for optimizer in self.component.optimizers.values() if steps_each_alone(optimizer)]

    def _share(self, needed: list[torch.Tensor]) -> None:
        """Every rank has these from now on. Collective; in the middle of a cell."""
        self._gather(needed)
        self.promoted |= {id(t) for t in needed}
        self._hold_anew()

    def _reorder(self, staged: StagedModel, order: list[int]) -> None:
        """The parts are called in this order; those that are not come last. Collective; in the middle of a cell."""
        self._gather()
        left = [number for number in range(len(staged.parts)) if number not in set(order)]
        staged.parts = [staged.parts[number] for number in (*order, *left)]
        if not self.options.balance[:1].isdigit():
            staged.counts = cut_evenly([size(part) for part in staged.parts], self.place.ranks)
        self._hold_anew()
        if self.place.rank == 0:
            name = type(staged.root).__name__
            print(f"{name} calls its parts in another order than it registers them: {staged.describe()}")

    def _gather(self, needed: list[torch.Tensor] | None = None) -> None:
        """These are whole on every rank, or all are. Collective."""
        self.stage_tensors.off()
        self.stage_parameters.gather(needed)
        self.state.make_whole(self._divided(), needed)

    def _hold_anew(self) -> None:
        self.shared.leave()
        self._hold()
        self.shared.enter()
        self._place()

    def _place(self) -> None:
        """From now on tensors of one rank are read and written on all."""
        self.stage_tensors.on(self.stage_parameters.places())

    def _describe(self) -> None:
        for staged in self.staged_models:
            self.notes.append(staged.describe())
            norms = [m for m in staged.root.modules() if isinstance(m, layers.NormLayer) and m.track_running_stats]
            if norms:
                self.notes.append(
                    f"{type(norms[0]).__name__} in training normalises each micro-batch by itself; --microbatches says "
                    "how many there are of a batch"
                )

    def release_modules(self) -> Callable[[], Prepared | None]:
        inside = self.entered
        self._stop()  # what is open to all holds this one
        for staged in self.staged_models:
            vars(staged.root)[KEPT] = self
        alive = ref(self)

        def hold_again() -> Prepared | None:
            this = alive()
            if this is not None:
                for staged in this.staged_models:
                    vars(staged.root).pop(KEPT, None)
                if inside:
                    this.start()  # not collective: other ranks may hold it no more
            return this

        return hold_again

    # --- a cell ----------------------------------------------------------------------------------

    def enter(self) -> None:
        if not self.entered:
            self.stage_parameters.tell_gradients(self.place.device)
            self.start()

    def start(self) -> None:
        self.state.enter(self._divided())
        self.place.random_state.begin()
        parts = (part for module in self.component.modules.values() for part in module.modules())
        self.place.iterating = [norm for part in parts for norm in layers.power_iterations(part)]
        self.autograd.on()
        self.shared.enter()
        for calls in self.calls:
            calls.enter()
        self.step_hooks.hang(self.component.optimizers.values())
        self.entered = True
        owners.append(self)
        self._place()

    def leave(self, pause: bool = False) -> None:
        if pause and self.place.busy:
            raise NotSupported(MIDST)
        self._stop(pause)
        if not pause:
            self._forget()
            self.stage_parameters.let_gradients_go()

    def _stop(self, pause: bool = False) -> None:
        if self.entered:
            owners.remove(self)
        self.entered = False
        self.step_hooks.leave(pause)
        self._end_steps()
        self.stage_tensors.off()
        self.state.leave()
        for calls in self.calls:
            calls.leave()
        self.shared.leave()
        self.autograd.off()

    def _forget(self) -> None:
        """A forward or backward that was cut short."""
        self.place.inside = False
        self.place.channel.forget()
        self.place.failures.forget()
        self.stage_parameters.put_back()

    # --- the loop --------------------------------------------------------------------------------

    @contextmanager
    def backward(self, sync: bool = True) -> Iterator[float]:
        self._end_steps()
        self.stage_parameters.check_half(self.place.device)
        self.stage_parameters.note(step=False)
        self.stage_parameters.set_aside()
        try:
            with self.shared.backward():
                yield 1.0
        except BaseException as error:
            if is_everywhere(error):  # a cell may catch it, and look at what gradients there are
                self.stage_parameters.put_back()
                self.stage_parameters.tell_gradients(self.place.device)
                self.stage_parameters.half = True
            self._forget()
            raise
        finally:
            self.stage_parameters.put_back()
        self.stage_parameters.tell_gradients(self.place.device)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float | None) -> torch.Tensor | None:
        chosen = list(parameters)
        if norm_type is None or not any(id(p) in self.owners.of for p in chosen):
            return None
        with tensors.as_plain_tensors():
            return self.stage_parameters.clip(chosen, max_norm, norm_type, self.place.device)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.stage_parameters.check_half(self.place.device)
        if not steps_each_alone(optimizer) or (self.steps and self.steps[-1][0] is optimizer):
            return None
        if self.state.edited(optimizer):
            self.state.renew(optimizer)
        self.changed = self.state.stepping(optimizer)
        self._begin_step(optimizer)
        return with_closure(args, kwargs, lambda closure: self._outside(optimizer, closure))

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.stage_parameters.note(step=True)
        self.stage_parameters.set_aside()
        plain = ExitStack()
        plain.enter_context(self.stage_tensors.own_plain(self.stage_parameters.own_gradients))
        plain.enter_context(tensors.as_plain_tensors())
        self.steps.append((optimizer, plain))

    def _end_step(self) -> None:
        self.steps.pop()[1].close()
        self.stage_parameters.put_back()

    def _end_steps(self) -> None:
        """A step may have raised, and the loop gone on."""
        while self.steps:
            self._end_step()

    def _outside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure reads and writes on all ranks, as the loop does: it is no part of the step that calls it."""

        def called() -> Any:
            self._end_step()
            loss = closure()
            self._begin_step(optimizer)
            return loss

        return called

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.steps and self.steps[-1][0] is optimizer:
            self._end_step()
            with advising(TOGETHER), tensors.as_plain_tensors():
                self.state.stepped(optimizer, self.changed)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        if steps_each_alone(optimizer):
            self.state.loaded(optimizer)

    # --- between cells ---------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        yield from self.stage_parameters.pieces()
        yield from self.state.pieces(self._divided())

    def gradient_pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        return self.stage_parameters.gradient_pieces()

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        return replicas_of(self.component, lambda tensor: id(tensor) not in self.owners.of)

    def grow(self, component: Component) -> bool:
        if {id(m) for m in component.modules.values()} != {id(m) for m in self.component.modules.values()}:
            return False
        known = {id(p) for p in self.component.parameters()}
        if any(id(p) not in known for p in optimized(component)) or self._cut_otherwise():
            return False
        if not self.staged_models:  # to be trained it has to be cut
            return False
        _check(component)
        new, self.component = added(self.component, component), component
        for optimizer in filter(steps_each_alone, new):
            self.state.cut(optimizer)
        return True

    def close(self, whole: bool = True) -> None:
        if whole:
            self._gather()
        self._stop()
        self._forget()


class Pipeline(Strategy):
    """A model in stages."""

    facts = Facts(empty_weights="hollow", batch_per="pool")

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        microbatches: int = 0
        """how many parts of a batch are under way at a time; 0: four for each rank, of two samples at least"""
        balance: str = "auto"
        """how stages are cut: auto (by parameters), or so many parts in each: 2,3,2,1"""

        def __post_init__(self) -> None:
            if self.microbatches < 0:
                raise UsageError(f"--microbatches {self.microbatches}: a batch is cut into one part, or more")
            counts = self.balance.split(",")
            if self.balance != "auto" and not all(c.isdigit() and int(c) > 0 for c in counts):
                raise UsageError(f"--balance {self.balance}: it is auto, or how many parts each stage has: 2,3,2,1")

    def estimate(self, profile: Profile, world: World) -> Estimate:
        return estimate(self.options, profile, world)

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("the strategy pipeline needs ranks: write --devices 2, or --strategy single for one")
        return PipelineComponent(component, self.options)


def _check(component: Component) -> None:
    for where, module in component.modules.items():
        lazy = next((name for name, p in module.named_parameters() if is_lazy(p)), None)
        if lazy is not None:
            raise NotSupported(
                f"{where}.{lazy} has no shape yet, so that pipeline cannot cut the model into stages: call the model "
                "once on a batch in the notebook, or use --strategy ddp"
            )
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise NotSupported(ONE_RANK)
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in component.optimizers.values()):
        raise NotSupported(ONE_VECTOR)
