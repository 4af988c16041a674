"""One component behind one of DeepSpeed's engines: set up, entered and left, and whole again at the end.

The engine and what belongs to it are built in engine_parts.py; its tables are known in engine_layout.py. Calls of the
models go through the engine (engine_calls.py), which steps an `InnerOptimizer` (inner_optimizer.py). What is between
`loss.backward()` and `optimizer.step()` is in gradients.py. Where parameters and the optimizer's state are, in pieces,
and what the notebook and a cell see of them, is in weights.py, parameter_access.py and optimizer_state.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
import torch.distributed as dist

from nbtrain.compat import deepspeed as ds
from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Component, Prepared
from nbtrain.strategies.deepspeed import autograd_calls, config, error_texts
from nbtrain.strategies.deepspeed.engine_calls import EngineCalls
from nbtrain.strategies.deepspeed.engine_layout import SharePart
from nbtrain.strategies.deepspeed.engine_parts import LOW, build, held_by, modules_of
from nbtrain.strategies.deepspeed.error_texts import in_single, one_optimizer
from nbtrain.strategies.deepspeed.gradients import EngineGradients
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer, check_elementwise, refuse_whole
from nbtrain.strategies.deepspeed.library import as_local_rank, destroy, linear
from nbtrain.strategies.deepspeed.loss_scale import LossScale
from nbtrain.strategies.deepspeed.optimizer_state import UNEVEN
from nbtrain.strategies.deepspeed.quiet import quiet
from nbtrain.strategies.kit.collective_calls import subject_of_weight
from nbtrain.strategies.kit.gradient_average import launch_statistics, norms_of

HOLDER = "_nbtrain_engined"


class EngineComponent(Prepared):
    """A component whose models and optimizer are an engine's."""

    hooks_see_own_gradients = True
    divides_gradients = True
    drops_graphs = True
    sends_in_step = True

    def __init__(
        self, component: Component, settings: config.Settings, precision: str, scale: LossScale, place: str
    ) -> None:
        super().__init__(component)
        self.settings, self.precision, self.loss_scale, self.place = settings, precision, scale, place
        self.outputs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """see engine_calls.py; they outlive what is built"""
        self.tried: WeakSet[torch.optim.Optimizer] = WeakSet()
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
            refuse_whole(user)
            if user.state:
                self._try(user)
        return user

    def _try(self, user: torch.optim.Optimizer) -> None:
        """Once it is complete: it is set up from within torch's constructor where a cell makes it."""
        if user not in self.tried and (note := check_elementwise(user)):
            self.notes.append(note)
        self.tried.add(user)

    @property
    def device(self) -> torch.device:
        """Where the component is."""
        return self.component.parameters()[0].device

    def _build(self, user: torch.optim.Optimizer) -> None:
        component = self.component
        parts = self.parts = build(
            component, user, self.settings, self.precision, self.loss_scale, self.place, self.device, self.models,
            self.shapes, self.notes,
        )  # fmt: skip
        parts.weights.names = {id(p): subject_of_weight(name) for name, p in component.named_parameters()}
        self.gradients = EngineGradients(parts)
        self.reader = self.gradients.reader
        self.calls = EngineCalls(parts, self.reader, self.outputs)
        for module in modules_of(component):
            if not any(module is model for model in component.modules.values()):
                module.register_forward_pre_hook(self.calls.check_part)
        parts.attachments.find()
        self._hide()

    # -- a cell --------------------------------------------------------------------------

    def enter(self) -> None:
        if self.parts.entered:
            return
        held = self.gradients.paused is not None
        if not held and [p.requires_grad for p in self.parts.parameters] != self.parts.requires:
            self.close()
            self._build(self.parts.user)
        if isinstance(self.parts.inner, InnerOptimizer):
            self.parts.state.take()
            if self.parts.state.uneven:
                if held:
                    raise NotSupported(UNEVEN)
                self.close()
                self._build(self.parts.user)
        self._put_on()
        self.gradients.enter()
        self.enter_contexts()
        try:
            self.calls.enter()
        except BaseException:
            self.contexts.close()
            raise
        self.parts.entered = True

    def enter_contexts(self) -> None:
        """What is there while a cell runs. Where a part of it fails, nothing stays."""
        parts = self.parts
        with ExitStack() as put_on:
            autograd_calls.listening.on(parts)
            put_on.callback(autograd_calls.listening.off, parts)
            if parts.stage == 3:
                self.reader.begin()
                put_on.callback(self.reader.end)
            put_on.enter_context(as_local_rank(parts.device))  # stage 3 looks for it in its forward
            if parts.stage == 3:
                if self.settings["zero_optimization"].get("memory_efficient_linear", True):
                    linear.on(self)
                    put_on.callback(linear.off, self)
                for handle in parts.weights.hook_state_dicts(parts.models, parts.deepspeed.zero.GatheredParameters):
                    put_on.callback(handle.remove)
            if isinstance(parts.inner, InnerOptimizer):
                for handle in parts.state.hook_state_dicts(parts.device):
                    put_on.callback(handle.remove)
                parts.state.close_to_cell()
                put_on.callback(parts.state.open_again)
            self.contexts = put_on.pop_all()

    def leave(self) -> None:
        parts = self.parts
        if not parts.entered:
            if self.gradients.paused is not None:  # it was to go on, and does not
                self.gradients.leave()
            return
        parts.entered = False
        self.contexts.close()
        self.calls.leave()
        parts.weights.follow_edits(parts.trained)
        self.gradients.leave()
        if parts.stage == 3:
            with suppress(Exception):  # a cell that was cut short has left some in flight: the component goes then
                ds.let_go_of_whole(parts.engine.optimizer)
        self._hide()

    def pause(self) -> None:
        parts = self.parts
        if not parts.entered:
            return
        if self.calls.busy:
            raise NotSupported(error_texts.MIDST)
        if parts.has_another_layer():
            raise NotSupported(error_texts.ANOTHER_LAYER)
        parts.entered = False
        self.contexts.close()
        self.calls.pause()
        parts.weights.follow_edits(parts.trained)
        self.gradients.pause()
        if parts.stage == 3:
            ds.let_go_of_whole(parts.engine.optimizer)
        self._hide()

    def _hide(self) -> None:
        """Attachments off; parameters and state as the notebook knows them."""
        parts = self.parts
        parts.attachments.take_off()
        parts.weights.show(parts.parameters)
        if isinstance(parts.inner, InnerOptimizer):
            parts.state.show()

    def _put_on(self) -> None:
        self.parts.attachments.put_back()
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
            parts.attachments.take_off()
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
                    if (found := handle()) is not None:
                        found.take_off()
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
                parts.attachments.put_back()
                this.enter_contexts()
            return this

        return hold_again

    # -- the loop ------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        return self.gradients.skipped

    @contextmanager
    def backward(self) -> Iterator[float]:
        """Around a backward: yields what the loss is to be multiplied by; what DeepSpeed cannot do is said in words.
        Afterwards running statistics are averaged, so that all ranks evaluate the same model."""
        with self.gradients.backward() as share:
            yield share
        if self.norms:
            with torch.no_grad():
                launch_statistics(self.norms)()

    def before_clip_value(self, parameters: Iterable[torch.Tensor]) -> None:
        """`clip_grad_value_`: refused where these are the engine's."""
        mine = {id(p) for p in self.parts.trained}
        if any(id(p) in mine for p in parameters):
            raise NotSupported(
                "clip_grad_value_: DeepSpeed's engine holds the gradients, and clips them by their norm: write "
                "clip_grad_norm_, or take the strategy ddp"
            )

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        self.gradients.multiply(factor)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        return self.gradients.clip(parameters, max_norm, norm_type)

    def reset(self) -> None:
        self.gradients.reset()

    # -- pieces --------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, SharePart]]:
        yield from self.parts.weights.pieces(self.parts.parameters)
        if isinstance(self.parts.inner, InnerOptimizer):
            yield from self.parts.state.pieces(self.parts.trained)

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.parts.stage == 3 or self.precision in LOW:
            return
        yield from self.component.named_parameters()

    # -- the end -------------------------------------------------------------------------

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer is self.parts.user and held_by(optimizer) == self.parts.held

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        parts = self.parts
        if not self.knows(optimizer) and (optimizer is parts.user or not held_by(optimizer).isdisjoint(parts.held)):
            sentence = error_texts.OTHER_GROUPS if optimizer is parts.user else error_texts.ANOTHER_OPTIMIZER
            raise NotSupported(sentence.format(name=type(optimizer).__name__))
        if optimizer is parts.user and not self.settings.get("optimizer"):
            self._try(optimizer)

    def grow(self, component: Component) -> bool:
        """Schedulers hold the optimizer that they always held. One that the cell makes takes the other's place, and one
        that gets more parameters its own."""
        same = (
            component.modules.keys() == self.component.modules.keys()
            and all(component.modules[name] is module for name, module in self.component.modules.items())
            and not component.loose
        )
        user = self.parts.user
        if same and list(map(id, component.optimizers.values())) == [id(user)] and self.knows(user):
            self.component = self.parts.component = component
            return True
        if not same or self.gradients.paused is None or not component.optimizers:
            return False
        name = [*component.optimizers][-1]
        chosen = replace(component, optimizers={name: component.optimizers[name]})
        user = self._check(chosen)
        used = self.gradients.used_up()
        self.close()
        component.optimizers, self.component = chosen.optimizers, component
        self._build(user)
        self.gradients.go_on(used)
        return True

    @torch.no_grad()
    def close(self) -> None:
        """One tensor at a time: what is gathered becomes the parameter's own."""
        if self.gradients.held:
            raise NotSupported(error_texts.HELD)
        for tensor, piece in [*self.pieces()]:
            flat = torch.zeros(piece.shape.numel(), dtype=piece.dtype, device=tensor.device)
            for (start, stop), part in zip(piece.ranges(), piece.read(), strict=True):
                flat[start:stop].copy_(part)
            dist.all_reduce(flat)  # no two ranks speak for one number
            tensor.data = flat.view(piece.shape)
        self._part()

    @torch.no_grad()
    def drop(self) -> None:
        self.leave()
        self.parts.weights.own(self.parts.parameters)
        self._part()

    def _part(self) -> None:
        """From the engine: not collective."""
        parts = self.parts
        self.gradients.close()
        with quiet(), suppress(Exception):
            destroy(parts.engine)
        if parts.kernel is not None:
            parts.kernel.close()
            parts.kernel = None
        if parts.folder is not None:
            parts.folder.close()
            parts.folder = None
        parts.state.shown.clear()
        del parts.engine, parts.core, parts.layout, parts.weights
