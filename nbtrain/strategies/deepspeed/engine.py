"""One component behind one of DeepSpeed's engines: set up, entered and left, and whole again at the end.

The engine and what belongs to it are built in engine_parts.py; its tables are known in engine_layout.py. Calls of the
models go through the engine (engine_calls.py), which steps an `InnerOptimizer` (inner_optimizer.py). What is between
`loss.backward()` and `optimizer.step()` is in gradients.py. Where parameters and the optimizer's state are, in pieces,
and what the notebook and a cell see of them, is in weights.py, parameter_access.py with whole_parameters.py, and
optimizer_state.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat import deepspeed as ds
from nbtrain.compat import tensors
from nbtrain.strategies.base import Component, Prepared, Shards
from nbtrain.strategies.deepspeed import autograd_calls, config, error_texts
from nbtrain.strategies.deepspeed.engine_calls import EngineCalls
from nbtrain.strategies.deepspeed.engine_layout import SharePart
from nbtrain.strategies.deepspeed.engine_parts import LOW, build, modules_of, trained_by
from nbtrain.strategies.deepspeed.error_texts import in_single, one_optimizer
from nbtrain.strategies.deepspeed.gradients import EngineGradients
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer, check_elementwise
from nbtrain.strategies.deepspeed.library import as_local_rank, destroy, linear
from nbtrain.strategies.deepspeed.loss_scale import LossScale
from nbtrain.strategies.deepspeed.quiet import quiet
from nbtrain.strategies.deepspeed.stand_ins import MOVED, HeldGradient
from nbtrain.strategies.kit import named_tensors
from nbtrain.strategies.kit.collective_calls import subject_of_weight
from nbtrain.strategies.kit.component_tensors import named_parameters, parameters_of
from nbtrain.strategies.kit.owned_tensors import full_tensor
from nbtrain.strategies.kit.replicated import replicas_of
from nbtrain.strategies.kit.running_statistics import launch_statistics, norms_of

HOLDER = "_nbtrain_engined"


class EngineComponent(Shards):
    """A component whose models and optimizer are an engine's."""

    def __init__(
        self, component: Component, settings: config.Settings, precision: str, scale: LossScale, place: str
    ) -> None:
        super().__init__(component)
        self.settings, self.precision, self.loss_scale, self.place = settings, precision, scale, place
        self.outputs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """see engine_calls.py; they outlive what is built"""
        in_single(component)
        user = self._check(component)
        models = list(component.modules.values())
        inner = {id(part) for model in models for part in model.modules() if part is not model}
        self.models = [model for model in models if id(model) not in inner]
        self.norms = norms_of(self.models)
        self.shapes = {id(p): (p.shape, p.dtype) for p in component.parameters()}
        self._build(user)

    # -- set-up --------------------------------------------------------------------------

    def _check(self, component: Component) -> torch.optim.Optimizer:
        user = one_optimizer(component, self.settings)
        if not self.settings.get("optimizer"):
            check_elementwise(user, self.settings["zero_allow_untested_optimizer"])
        return user

    @property
    def device(self) -> torch.device:
        """Where the component is."""
        return self.component.parameters()[0].device

    def _build(self, user: torch.optim.Optimizer) -> None:
        """Gradients that are there become the engine's when it is entered."""
        component = self.component
        seeds, used = self._left(user)
        parts = self.parts = build(
            component, user, self.settings, self.precision, self.loss_scale, self.place, self.device, self.models,
            self.shapes, self.notes,
        )  # fmt: skip
        self.stepped_by = {user: parts.held}
        parts.weights.names = {id(p): subject_of_weight(name) for name, p in named_parameters(component)}
        self.gradients = EngineGradients(parts)
        self.seeds: dict[int, torch.Tensor] = seeds
        if used:
            self.gradients.go_on(used)
        self.reader = self.gradients.reader
        self.calls = EngineCalls(parts, self.reader, self.outputs)
        for module in modules_of(component):
            if not any(module is model for model in component.modules.values()):
                module.register_forward_pre_hook(self.calls.check_part)
        parts.attachments.record()
        self._hide()

    def _left(self, user: torch.optim.Optimizer) -> tuple[dict[int, torch.Tensor], set[int]]:
        """Gradients from before the engine was made, by id of the parameter, and the ids of those that a step has used
        up. The same parameters on every rank. Collective."""
        trained = trained_by(user)
        used = {id(p) for p in trained if isinstance(p.grad, HeldGradient)}
        there = [p.grad is not None and id(p) not in used for p in trained]
        here = torch.tensor(there, dtype=torch.int32, device=self.component.parameters()[0].device)
        dist.all_reduce(here)
        some = [p for p, count in zip(trained, here.tolist(), strict=True) if count]
        return {id(p): p.new_zeros(p.shape) if p.grad is None else p.grad for p in some}, used

    # -- a cell --------------------------------------------------------------------------

    def enter(self) -> None:
        if self.parts.entered:
            return
        if isinstance(self.parts.inner, InnerOptimizer):
            self.parts.state.take()
        changed = [p.requires_grad for p in self.parts.parameters] != self.parts.requires
        if changed and self.gradients.paused is None:
            self.close()
            self._build(self.parts.user)
        self._put_on()
        self.gradients.enter()
        self.enter_contexts()
        try:
            self.calls.enter()
            self.parts.entered = True
            seeds, self.seeds = self.seeds, {}
            if seeds:
                self.gradients.seed(seeds)
        except BaseException:
            self.parts.entered = False
            self.contexts.close()
            raise

    def enter_contexts(self) -> None:
        """What is there while a cell runs. Where a part of it fails, nothing stays."""
        parts = self.parts
        with ExitStack() as put_on:
            autograd_calls.listening.on(parts)
            put_on.callback(autograd_calls.listening.off, parts)
            named_tensors.owners.append(parts)
            put_on.callback(named_tensors.owners.remove, parts)
            if parts.stage == 3:
                self.reader.begin()
                put_on.callback(self.reader.end)
            put_on.enter_context(as_local_rank(parts.device))  # stage 3 looks for it in its forward
            if parts.stage == 3:
                if self.settings["zero_optimization"].get("memory_efficient_linear", True):
                    linear.on(self)
                    put_on.callback(linear.off, self)
                for handle in parts.weights.hook_state_dicts(parts.models):
                    put_on.callback(handle.remove)
            if isinstance(parts.inner, InnerOptimizer):
                for handle in parts.state.hook_state_dicts(parts.device):
                    put_on.callback(handle.remove)
                parts.state.close_to_cell()
                put_on.callback(parts.state.open_again)
            self.contexts = put_on.pop_all()

    def leave(self, pause: bool = False) -> None:
        parts = self.parts
        if not parts.entered:
            if self.gradients.paused is not None and not pause:  # it was to go on, and does not
                self.gradients.leave()
                self.reader.settle()
            return
        if pause and self.calls.busy:
            raise NotSupported(error_texts.MIDST)
        if pause and parts.has_another_layer():
            raise NotSupported(error_texts.ANOTHER_LAYER)
        parts.entered = False
        self.contexts.close()
        if not pause:
            self.reader.settle()
        self.calls.leave(pause)
        moved = parts.stage != 3 and self.gradients.moved()
        parts.weights.follow_edits(parts.trained)
        (self.gradients.pause if pause else self.gradients.leave)()
        if parts.stage == 3:
            # A cell that was cut short has left some in flight: the component goes then.
            with nullcontext() if pause else suppress(Exception):
                ds.let_go_of_whole(parts.engine.optimizer)
        self._hide()
        if not pause:
            parts.weights.shown_copies.clear()
            parts.state.given.clear()
        if moved:
            raise NotSupported(MOVED)

    def _hide(self) -> None:
        """Attachments off; parameters and state as the notebook knows them."""
        parts = self.parts
        parts.attachments.off()
        parts.weights.show(parts.parameters)
        if isinstance(parts.inner, InnerOptimizer):
            parts.state.show()

    def _put_on(self) -> None:
        self.parts.attachments.on()
        self.parts.weights.put_back(self.parts.parameters)

    def release_modules(self) -> Callable[[], Prepared | None]:
        """An engine holds its models in more places than could be emptied. So it is turned around: the modules hold
        this object, and nobody else does. If somebody holds one of the modules, everything stays; if nobody does, the
        garbage collector finds modules and engine together. What would hold the modules from outside is taken away
        meanwhile: what DeepSpeed has put on parameters, which the old optimizer still holds when the next one is made,
        and what DeepSpeed keeps in tables of its own."""
        parts, entered = self.parts, self.parts.entered
        if entered:  # between cells nothing of this is on
            self.contexts.close()
            self.reader.settle()
            parts.attachments.off()
        tables = [table for p in parts.trained if (table := tensors.hook_table(p, tensors.ACCUMULATED_HOOKS))]
        hooks = [dict(table) for table in tables]
        for table in tables:
            table.clear()
        times = ds.forget_module(parts.engine.module)
        modules = [module for model in parts.models for module in model.modules()]
        parts.meanwhile = tables, hooks, modules
        for module in modules:
            vars(module)[HOLDER] = self
        # What is returned may hold none of these.
        alive, user, handle = ref(self), ref(parts.user), ref(self.gradients.handle)
        steps, scale, number = isinstance(parts.inner, InnerOptimizer), parts.loss_scale, id(self.gradients)

        def hold_again() -> EngineComponent | None:
            this = alive()
            if this is None:
                scale.holding.discard(number)
                if (optimizer := user()) is not None:  # what it held of the engine's means nothing any more
                    if (engine := handle()) is not None:
                        engine.take_off()
                    for p in (p for group in optimizer.param_groups for p in group["params"]):
                        p.grad = None
                    if steps:
                        optimizer.state.clear()
                return None
            parts = this.parts
            tables, hooks, modules = parts.meanwhile
            parts.meanwhile = None
            for module in modules:
                vars(module).pop(HOLDER, None)
            for table, own in zip(tables, hooks, strict=True):
                table.update(own)
            ds.remember_module(parts.engine.module, times)
            if entered:
                parts.attachments.on()
                this.enter_contexts()
            return this

        return hold_again

    # -- the loop ------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        return self.gradients.skipped

    @contextmanager
    def backward(self, sync: bool = True) -> Iterator[float]:
        """Around a backward: yields what the loss is to be multiplied by; what DeepSpeed cannot do is said in words.
        Afterwards running statistics are averaged, so that all ranks evaluate the same model."""
        try:
            with self.gradients.backward() as share:
                yield share
        except BaseException:
            self.gradients.reset()
            raise
        if self.norms:
            with torch.no_grad():
                launch_statistics(self.norms)()

    def complete_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        named, mine = [*parameters], {id(p) for p in self.parts.trained}
        self.gradients.complete(any(id(p) in mine for p in named))
        for p in named:
            if id(p) not in mine and p.grad is not None:  # each rank has its own of what no engine trains
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def gradient_pieces(self) -> Iterator[tuple[torch.Tensor, SharePart]]:
        return self.gradients.held.pieces()

    def drop_gradient(self, p: torch.Tensor) -> None:
        self.gradients.drop(p)

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        self.gradients.held.multiply(factor)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float | None) -> torch.Tensor | None:
        if norm_type is None:
            mine = {id(p) for p in self.parts.trained}
            if any(id(p) in mine for p in parameters):
                raise NotSupported(error_texts.CLIPPED_BY_VALUE)
            return None
        return self.gradients.clip(parameters, max_norm, norm_type)

    # -- pieces --------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, SharePart]]:
        yield from self.parts.weights.pieces(self.parts.parameters)
        if isinstance(self.parts.inner, InnerOptimizer):
            yield from self.parts.state.pieces()

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        in_pieces = set(map(id, self.parts.parameters)) if self.parts.stage == 3 or self.precision in LOW else ()
        return replicas_of(self.component, lambda tensor: id(tensor) not in in_pieces)

    # -- the end -------------------------------------------------------------------------

    def grow(self, component: Component) -> bool:
        """Schedulers hold the optimizer that they always held. One that the cell makes takes the other's place, and one
        that gets more parameters its own."""
        same = (
            component.modules.keys() == self.component.modules.keys()
            and all(component.modules[name] is module for name, module in self.component.modules.items())
            and not component.loose
        )
        user, keys = self.parts.user, set(map(id, parameters_of(self.parts.user)))
        if same and list(map(id, component.optimizers.values())) == [id(user)] and keys == self.parts.held:
            self.component = self.parts.component = component
            return True
        if not same or self.gradients.paused is None or not component.optimizers:
            return False
        name = [*component.optimizers][-1]
        chosen = replace(component, optimizers={name: component.optimizers[name]})
        user = self._check(chosen)
        self.close()
        component.optimizers, self.component = chosen.optimizers, component
        self._build(user)
        return True

    @torch.no_grad()
    def close(self, whole: bool = True) -> None:
        """One tensor at a time: what is gathered becomes the parameter's own. In a pause gradients stay with the
        parameters, until they are set up again."""
        if not whole:
            self.leave()
            self.parts.weights.own(self.parts.parameters)
            self._part()
            return
        held = self.gradients.held
        if held.some and any(id(p) in held.arrived and not p.requires_grad for p in self.parts.trained):
            raise NotSupported(error_texts.HELD)
        gradients_there = self.gradients.used_up() or held.full()
        for tensor, piece in [*self.pieces()]:
            tensor.data = full_tensor(piece, tensor.device)
        trained = self.parts.trained
        self._part()
        for p in trained:
            p.grad = gradients_there.get(id(p))

    def _part(self) -> None:
        """From the engine: not collective."""
        parts = self.parts
        self.reader.settle()
        self.gradients.close()
        with quiet(), suppress(Exception):
            destroy(parts.engine)
        if parts.folder is not None:
            parts.folder.cleanup()
            parts.folder = None
        parts.state.shown.clear()
        parts.state.forget()
        del parts.engine, parts.core, parts.layout, parts.weights
