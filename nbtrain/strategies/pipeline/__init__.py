"""`pipeline`: each rank holds some layers of a model, a stage; every batch goes through all of them, cut into
micro-batches, so that the stages work at the same time.

The loop is the plain one, on every rank: all see the same batches, the output of the last stage goes to all of them,
and each computes the same loss, whose backward runs the stages the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbtrain.compat import layers, tensors
from nbtrain.errors import NotSupported, UsageError
from nbtrain.strategies.base import Component, Piece, Prepared, Strategy, is_lazy
from nbtrain.strategies.kit.call_arguments import with_closure
from nbtrain.strategies.kit.lone_steps import steps_each_alone
from nbtrain.strategies.kit.sharding_units import outermost
from nbtrain.strategies.memory_estimate import Estimate, Profile, World
from nbtrain.strategies.pipeline.autograd_calls import AutogradCalls
from nbtrain.strategies.pipeline.by_parts import ByParts
from nbtrain.strategies.pipeline.criterion import NamedCriterion
from nbtrain.strategies.pipeline.cut_stages import PartHooks, StagedModel, cut_evenly, cut_models, find_owners, size
from nbtrain.strategies.pipeline.estimate import estimate
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_calls import StageCalls
from nbtrain.strategies.pipeline.stage_messages import is_everywhere
from nbtrain.strategies.pipeline.stage_parameters import StageParameters, listening
from nbtrain.strategies.pipeline.tied_gradients import TiedGradients

KEPT = "_nbtrain_staged"
MIDST = (
    "something was set up in the middle of a model's forward or backward, which under pipeline cannot be laid aside: "
    "do it between steps, or use --strategy ddp"
)
ONE_RANK = (
    "SyncBatchNorm asks all ranks for their share of a batch, and under pipeline one rank alone has the layer: leave "
    "it a BatchNorm (--microbatches 1 gives it whole batches), or use --strategy ddp"
)
ONE_VECTOR = (
    "LBFGS works on one vector of all parameters, and under pipeline each rank has those of its own stage. --strategy "
    "ddp can"
)


class PipelineComponent(Prepared):
    """A component whose models are in stages."""

    sends_in_step = True

    def __init__(self, component: Component, options: Pipeline.Options) -> None:
        super().__init__(component)
        self.loss: NamedCriterion | None = None
        self.options = options
        _check(component)
        device = next((p.device for p in component.parameters()), torch.device("cpu"))
        self.place = StagePlace(device)
        roots = outermost(component.modules.values())
        self.staged_models, small = cut_models(roots, self.place.ranks, options.balance)
        for model in small:
            self.notes.append(f"{type(model).__name__} has too few parts for stages: every rank has all of it")
        self.hooks = PartHooks(self.staged_models)
        self.promoted: set[int] = set()
        if options.loss is not None:
            named, function = options.criterion()
            self.loss = NamedCriterion(named, function, component.parameters)
        self.calls = [
            StageCalls(
                staged,
                self.place,
                options.microbatches,
                lambda t: id(t) in self.owners.of,
                self._share,
                self._move,
                self._reorder,
                self._hooked,
                measure=options.balance if options.balance in ("time", "memory") else "",
                loss=self.loss,
            )
            for staged in self.staged_models
        ]
        self.handles: list[Any] = []
        models = [staged.root for staged in self.staged_models]
        self.autograd = AutogradCalls(component.parameters(), self.place, models)
        self.stage_tensors = self.place.stage_tensors
        self.steps: list[Any] = []
        """what ends with a step that is under way"""
        self._hold()
        self._describe()

    def _hold(self) -> None:
        """As the models are cut now."""
        component, place = self.component, self.place
        self.hooks.look()
        self.owners = find_owners(self.staged_models, component.parameters(), component.buffers(), self.promoted)
        owners, optimizers = self.owners, component.optimizers.values()
        self.stage_parameters = StageParameters(owners, optimizers, place.rank, self.stage_tensors)
        self.stage_parameters.hide()
        self.by_parts = ByParts(self._parts(), place, self._look)
        foreign = [p for p in component.parameters() if self.stage_parameters.foreign(p)]
        own = [p for p in component.parameters() if not self.stage_parameters.foreign(p)]
        self.shared = TiedGradients(owners.shared, foreign, own, place)

    def _parts(self) -> Iterator[tuple[nn.Module, int]]:
        """(part, the rank that owns it); taken apart for the sake of users' hooks."""
        return self.hooks.apart(pair for staged in self.staged_models for pair in staged.owners())

    def _share(self, needed: list[torch.Tensor]) -> None:
        """Every rank has these from now on. Collective; in the middle of a cell."""
        self.stage_tensors.off()
        self.stage_parameters.gather(needed)
        self.promoted |= {id(t) for t in needed}
        self._hold_anew()

    def _move(self, staged: StagedModel, counts: list[int]) -> None:
        """The stages are these from now on. Collective; in the middle of a cell."""
        self.stage_tensors.off()
        self.stage_parameters.gather()
        staged.counts = counts
        self._hold_anew()
        if self.place.rank == 0:
            print(f"balanced by {self.options.balance}: {staged.describe()}")

    def _reorder(self, staged: StagedModel, order: list[int]) -> None:
        """The parts are called in this order; those that are not come last. Collective; in the middle of a cell."""
        self.stage_tensors.off()
        self.stage_parameters.gather()
        left = [number for number in range(len(staged.parts)) if number not in set(order)]
        staged.parts = [staged.parts[number] for number in (*order, *left)]
        if not self.options.balance[:1].isdigit():
            staged.counts = cut_evenly([size(part) for part in staged.parts], self.place.ranks)
        self._hold_anew()
        if self.place.rank == 0:
            name = type(staged.root).__name__
            print(f"{name} calls its parts in another order than it registers them: {staged.describe()}")

    def _look(self) -> None:
        """Hooks of the user's may have come, or gone."""
        if self.hooks.look():
            self.by_parts.take(self._parts())
            for calls in self.calls:
                if (found := self.hooks.below(calls.staged.root)) is not None:
                    calls.tell_of_hook(found)

    def _hooked(self, staged: StagedModel) -> nn.Module | None:
        """A module of it that has one."""
        self._look()
        return self.hooks.below(staged.root)

    def _hold_anew(self) -> None:
        self.shared.leave()
        self.by_parts.leave()
        listening.off(self.stage_parameters)
        self._hold()
        self.shared.enter()
        self.by_parts.enter()
        listening.on(self.stage_parameters)
        self._place()

    def _place(self) -> None:
        """From now on tensors of one rank are read and written on all."""
        self._unmark()
        self.stage_tensors.on(self.stage_parameters.places())
        self.stage_tensors.add(self.stage_parameters.states())

    def _unmark(self) -> None:
        parts = (self.stage_parameters.places(), self.stage_parameters.states())
        self.stage_tensors.off({id(tensor) for part in parts for tensor, _, _ in part})

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
        inside = bool(self.handles)
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
                    this.enter()
            return this

        return hold_again

    # --- a cell ----------------------------------------------------------------------------------

    def enter(self) -> None:
        if self.handles:
            return
        self.stage_parameters.hide_states()
        self.stage_parameters.tell_gradients(self.place.device)
        self.place.random_state.begin()
        parts = (part for module in self.component.modules.values() for part in module.modules())
        self.place.iterating = [norm for part in parts for norm in layers.power_iterations(part)]
        listening.on(self.stage_parameters)
        self.autograd.on()
        self.by_parts.enter()
        self.shared.enter()
        for calls in self.calls:
            calls.enter()
        self.handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        if self.loss is not None:
            self.loss.enter()
        self._place()

    def leave(self) -> None:
        self._stop()
        self.reset()
        self.stage_parameters.let_gradients_go()

    def pause(self) -> None:
        if self.place.inside:
            raise NotSupported(MIDST)
        self._stop()

    def _stop(self) -> None:
        while self.handles:
            self.handles.pop().remove()
        self.steps.clear()
        self._unmark()
        if self.loss is not None:
            self.loss.leave()
        for calls in self.calls:
            calls.leave()
        self.shared.leave()
        self.by_parts.leave()
        self.autograd.off()
        listening.off(self.stage_parameters)

    def reset(self) -> None:
        self.place.inside = False
        self.place.channel.forget()
        self.place.failures.forget()
        self.stage_parameters.put_back()

    # --- the loop --------------------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[float]:
        self.stage_parameters.check_half(self.place.device)
        self.stage_parameters.set_aside()
        try:
            with self.shared.backward():
                yield 1.0
        except Exception as error:
            if is_everywhere(error):  # a cell may catch it, and look at what gradients there are
                self.stage_parameters.put_back()
                self.stage_parameters.tell_gradients(self.place.device)
                self.stage_parameters.half = self.stage_parameters.own_gradients()
            raise
        finally:
            self.stage_parameters.put_back()
        self.stage_parameters.tell_gradients(self.place.device)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        held = list(parameters)
        if not any(id(p) in self.owners.of for p in held):
            return None
        with tensors.as_plain_tensors():
            return self.stage_parameters.clip(held, max_norm, norm_type, self.place.device)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.stage_parameters.knows(optimizer):
            self.stage_parameters.check_half(self.place.device)
            self.stage_parameters.missed(optimizer)
        if self.stage_parameters.learns(optimizer) and self._per_parameter(optimizer):
            self._begin_step(optimizer)
            return with_closure(args, kwargs, lambda closure: self._outside(optimizer, closure))
        return None

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.stage_parameters.set_aside()
        own_plain = self.stage_tensors.own_plain(lambda: self.stage_parameters.stepped(optimizer))
        own_plain.__enter__()
        self.steps.append((optimizer, own_plain))

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.steps and self.steps[-1][0] is optimizer:
            self.steps.pop()[1].__exit__(None, None, None)
        self.stage_parameters.put_back()

    def _outside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure reads and writes on all ranks, as the loop does: it is no part of the step that calls it."""

        def called() -> Any:
            self._end_step(optimizer)
            found = closure()
            self._begin_step(optimizer)
            return found

        return called

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.stage_parameters.knows(optimizer):
            self._end_step(optimizer)
            self.stage_parameters.tell_states(optimizer, self.place.device)

    def _per_parameter(self, optimizer: torch.optim.Optimizer) -> bool:
        """What torch's own optimizers do to a parameter depends on no other: each rank steps those of its stage. Of
        anybody else's nobody knows (kit/lone_steps.py), so that they read and write on all ranks."""
        if self.steps and self.steps[-1][0] is optimizer:
            return False
        return steps_each_alone(optimizer)

    # --- between cells ---------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        return self.stage_parameters.pieces()

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        mine = {id(p) for p in self.owners.shared}
        yield from ((name, p) for name, p in self.component.named_parameters() if id(p) in mine and not is_lazy(p))
        yield from self.component.loose.items()

    def grow(self, component: Component) -> bool:
        if {id(m) for m in component.modules.values()} != {id(m) for m in self.component.modules.values()}:
            return False
        known = {id(p) for p in self.component.parameters()}
        held = [p for o in component.optimizers.values() for group in o.param_groups for p in group["params"]]
        if any(id(p) not in known for p in held):
            return False
        _check(component)
        self.component = component
        self.stage_parameters.optimizers = list(component.optimizers.values())
        self.stage_parameters.hide_states()
        return True

    def close(self) -> None:
        self.stage_parameters.gather()
        self.drop()

    def drop(self) -> None:
        self._stop()
        self.reset()


class Pipeline(Strategy):
    """A model in stages."""

    empty_weights = "hollow"

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        microbatches: int = 0
        """how many parts of a batch are under way at a time; 0: four for each rank, of two samples at least"""
        balance: str = "auto"
        """how stages are cut: auto (by parameters), by measured time or memory, or so many parts in each: 2,3,2,1"""
        loss: Any = None
        """the criterion, called as criterion(model(x), y): forwards and backwards of micro-batches take turns (1F1B)"""

        def __post_init__(self) -> None:
            if self.microbatches < 0:
                raise UsageError(f"--microbatches {self.microbatches}: a batch is cut into one part, or more")
            counts = self.balance.split(",")
            if self.balance not in ("auto", "time", "memory") and not all(c.isdigit() and int(c) > 0 for c in counts):
                raise UsageError(
                    f"--balance {self.balance}: it is auto, time, memory, or how many parts each stage has: 2,3,2,1"
                )
            of_torch = str(getattr(self.loss, "__module__", "")).startswith("torch.") and callable(self.loss)
            if self.loss is not None and not (isinstance(self.loss, nn.Module | str) or of_torch):
                raise UsageError(
                    "--loss takes a module (nn.CrossEntropyLoss() or one of yours) or a function of torch's "
                    "(F.cross_entropy) that the loop calls with the model's output and the targets; put a function of "
                    "yours into a module's forward, or leave --loss out"
                )

        def criterion(self) -> tuple[str, Any]:
            """The name of its class, or the function of torch's that it is."""
            if isinstance(self.loss, str):
                return self.loss, None
            if isinstance(self.loss, nn.Module):
                return type(self.loss).__name__, None
            return "", self.loss

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        """Every rank sees every batch: it is the model that is divided."""
        return 0, 1

    def estimate(self, profile: Profile, world: World) -> Estimate:
        return estimate(self.options, profile, world)

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("the strategy pipeline needs ranks: write --devices 2, or --strategy single for one")
        if self.options.loss is not None and precision not in ("32", "bf16-mixed"):
            raise UsageError(
                f"--loss with --precision {precision}: gradients are there before the loss is scaled; take bf16-mixed, "
                "or leave --loss out"
            )
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
