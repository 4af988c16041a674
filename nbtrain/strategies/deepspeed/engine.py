"""One component behind one of DeepSpeed's engines: set up, entered and left, and whole again at the end.

What the engine takes for the model is a `Core` (wrapped_module.py), and calls of the models go through it (calls.py).
The optimizer it steps is an `Inner` one (inner_optimizer.py). What happens between `loss.backward()` and
`optimizer.step()` is in gradients.py; where parameters and the optimizer's state are, in pieces, and what the notebook
sees of them, in weights.py and optimizer_state.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat import deepspeed as ds
from nbtrain.compat.brought import DEEPSPEED
from nbtrain.errors import NotSupported
from nbtrain.intercept import original
from nbtrain.strategies.base import Component, Prepared
from nbtrain.strategies.deepspeed import compile_ops as ops
from nbtrain.strategies.deepspeed import config
from nbtrain.strategies.deepspeed import messages as sentences
from nbtrain.strategies.deepspeed.attachments import Attachments
from nbtrain.strategies.deepspeed.autograd_refusals import asked
from nbtrain.strategies.deepspeed.calls import EngineCalls
from nbtrain.strategies.deepspeed.gradients import Gradients
from nbtrain.strategies.deepspeed.inner_optimizer import CpuAdam, Inner, adam_kind, check, unhooked
from nbtrain.strategies.deepspeed.library import (
    COLLAPSED,
    as_local_rank,
    destroy,
    equal_already,
    library,
    linear,
)
from nbtrain.strategies.deepspeed.loss_scale import LossScale
from nbtrain.strategies.deepspeed.messages import in_single, one_optimizer
from nbtrain.strategies.deepspeed.nvme_folder import Folder
from nbtrain.strategies.deepspeed.optimizer_state import UNEVEN, EngineOptimizerState, once
from nbtrain.strategies.deepspeed.parameter_access import ParameterAccess
from nbtrain.strategies.deepspeed.quiet import quiet
from nbtrain.strategies.deepspeed.release_modules import let_go
from nbtrain.strategies.deepspeed.shares import EngineLayout, SharePart
from nbtrain.strategies.deepspeed.state_dicts import whole_dicts, whole_state
from nbtrain.strategies.deepspeed.weights import Weights, unreadable
from nbtrain.strategies.deepspeed.wrapped_module import LOW, Core, outermost


class Engined(Prepared):
    """`skipped`: steps left out because a gradient was infinite."""

    hooks_see_own_gradients = True
    divides_gradients = True

    def __init__(
        self, component: Component, settings: config.Settings, precision: str, scale: LossScale, place: str
    ) -> None:
        super().__init__(component)
        self.settings, self.precision, self.loss_scale, self.place = settings, precision, scale, place
        self.stage: int = settings["zero_optimization"]["stage"]
        self.entered = False
        self.calls = EngineCalls(self)
        self.kernel: CpuAdam | None = None
        self.folder: Folder | None = None
        self.meanwhile: Any = None
        """while it is let go of: see release_modules.py"""
        in_single(component)
        self.user = self._check(component)
        self.models = outermost(component.modules.values())
        self.shapes = {id(p): (p.shape, p.dtype) for p in component.parameters()}
        self._build()

    # -- set-up --------------------------------------------------------------------------

    def _check(self, component: Component) -> torch.optim.Optimizer:
        user = one_optimizer(component, self.settings)
        if not self.settings.get("optimizer") and (note := check(user)):
            self.notes.append(note)
        return user

    def _build(self) -> None:
        component, settings = self.component, self.settings
        parameters = self.parameters = component.parameters()  # a cell may put another layer into the model
        self.device = parameters[0].device
        self.requires = [p.requires_grad for p in parameters]
        self.held = held_by(self.user)
        self.trained = [p for g in self.user.param_groups for p in g["params"] if p.requires_grad and p.numel()]
        if not self.trained:
            raise NotSupported("nothing that the optimizer holds requires gradients: there is nothing to train")
        deepspeed = self.deepspeed = library(self.device)
        wanted = {config.offload(settings, "offload_param"), config.offload(settings, "offload_optimizer")}
        if "nvme" in wanted:
            ops.load(deepspeed, "AsyncIOBuilder")
            places = [section.get("nvme_path") for _, section in config.sections(settings)]
            self.folder = Folder(self.place or next(filter(None, places)))
            for _, section in config.sections(settings):
                section["nvme_path"] = self.folder.path
            self.notes.append(
                "what is smaller than 1 MiB on a rank stays in memory: DeepSpeed does not swap it to nvme"
            )
        decoupled = adam_kind(self.user)
        own = not settings.get("optimizer")
        if own and decoupled is not None and config.offload(settings, "offload_optimizer") != "none":
            self.kernel = CpuAdam(ops.load(deepspeed, "CPUAdamBuilder"), decoupled)
            self.notes.append(
                f"{type(self.user).__name__} steps in the host's memory, by the kernel of DeepSpeedCPUAdam"
            )
        self._activations(deepspeed)

        modules = list({id(m): m for model in component.modules.values() for m in model.modules()}.values())
        self.attachments = Attachments(modules, parameters)
        for p in parameters:
            p.grad = None
            if self.stage == 3:
                setattr(p, COLLAPSED, unreadable(p, LOW.get(self.precision)))
        frozen: dict[int, torch.Tensor] = {}
        if self.precision in LOW:
            kept = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
            frozen = {id(p): p.data.clone() for p in kept}
        self.core = Core(self.models, self.precision, self.device, self.stage != 3)
        mine = set(map(id, self.trained))
        kinds = once(self.trained, self.user.state) if own else {}
        self.inner = Inner.make(self.user, lambda p: id(p) in mine, lambda p: kinds.get(id(p)))
        self.inner.kernel = self.kernel
        self.sources = self.inner.sources
        if own and self.device.type == "cuda" and decoupled is not None and self.kernel is None:
            self._fuse()
        with quiet(), equal_already(), as_local_rank(self.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine = self._initialize(own)
        if not own:
            kind = settings["optimizer"].get("type")
            self.notes.append(
                f"the config's {kind} trains, with its own learning rate; {type(self.user).__name__} is what step() is "
                f"called on, and its state stays as it is"
            )
        self.layout = EngineLayout(self.engine, self.stage)
        self.state = EngineOptimizerState(self.user, self.inner, self.layout)
        if own:
            self.state.take()
        self.weights = Weights(self.layout, self.state, self.attachments, self.shapes, frozen, parameters)
        self.gradients = Gradients(self)
        self.reader = ParameterAccess(
            self.weights, parameters if self.stage == 3 else (), self.gradients.open_for_penalty
        )
        for module in modules:
            if not any(module is model for model in component.modules.values()):
                module.register_forward_pre_hook(self.calls.check_part)
        self.attachments.find()
        self._hide()

    def _initialize(self, own: bool) -> Any:
        settings, make = self.settings, original(DEEPSPEED)
        if self.stage == 3:  # a bucket larger than everything is only memory
            zero = settings["zero_optimization"]
            total = max(2, sum(p.numel() for p in self.trained))
            settings = {
                **settings,
                "zero_optimization": {**zero, "reduce_bucket_size": min(zero["reduce_bucket_size"], total)},
            }
        if own:
            engine, *_ = make(model=self.core, optimizer=self.inner, config=settings)
        else:
            groups = [{"params": group["params"]} for group in self.inner.param_groups]
            engine, *_ = make(model=self.core, model_parameters=groups, config=settings)
            self.inner = _quiet_steps(engine.basic_optimizer)
        return engine

    def _fuse(self) -> None:
        """On a GPU torch's own fused step is what FusedAdam would be, and needs no compiling."""
        if any(g.get("foreach") or g.get("capturable") or g.get("fused") is False for g in self.user.param_groups):
            return
        self.inner.overrides["fused"] = True
        self.inner.take_options()
        self.notes.append(f"{type(self.user).__name__} steps this rank's share with torch's fused kernel")

    def _activations(self, deepspeed: Any) -> None:
        """For a model that calls `deepspeed.checkpointing.checkpoint` itself."""
        section = self.settings.get("activation_checkpointing") or {}
        with quiet():
            deepspeed.checkpointing.configure(
                None,
                partition_activations=bool(section.get("partition_activations")),
                checkpoint_in_cpu=bool(section.get("cpu_checkpointing")),
                contiguous_checkpointing=section.get("contiguous_memory_optimization"),
                num_checkpoints=section.get("number_checkpoints"),
            )

    # -- a cell --------------------------------------------------------------------------

    def enter(self) -> None:
        if self.entered:
            return
        held = self.gradients.aside is not None
        if not held and [p.requires_grad for p in self.parameters] != self.requires:
            self.close()
            self._build()
        if isinstance(self.inner, Inner):
            self.state.take()
            if self.state.uneven:
                if held:
                    raise NotSupported(UNEVEN)
                self.close()
                self._build()
        self._put_on()
        self.gradients.enter()
        self.surround()
        try:
            self.calls.enter()
        except BaseException:
            self.surroundings.close()
            raise
        self.entered = True

    def surround(self) -> None:
        with ExitStack() as put_on:
            self._surround(put_on)
            self.surroundings = put_on.pop_all()

    def _surround(self, put_on: ExitStack) -> None:
        """What is there while a cell runs. Where a part of it fails, nothing stays."""
        asked.on(self)
        put_on.callback(asked.off, self)
        if self.stage == 3:
            self.reader.begin()
            put_on.callback(self.reader.end)
        put_on.enter_context(as_local_rank(self.device))  # stage 3 looks for it in its forward
        if self.stage == 3:
            if self.settings["zero_optimization"].get("memory_efficient_linear", True):
                linear.on(self)
                put_on.callback(linear.off, self)
            for handle in whole_dicts(self.models, self.deepspeed.zero.GatheredParameters, self.weights.load):
                put_on.callback(handle.remove)
        if isinstance(self.inner, Inner):
            for handle in whole_state(self.state, self.device):
                put_on.callback(handle.remove)
            self.state.close_to_cell()
            put_on.callback(self.state.open_again)

    def leave(self) -> None:
        if not self.entered:
            if self.gradients.aside is not None:  # it was to go on, and does not
                self.gradients.leave()
            return
        self.entered = False
        self.surroundings.close()
        self.calls.leave()
        self.weights.follow_edits(self.trained)
        self.gradients.leave()
        if self.stage == 3:
            with suppress(Exception):  # a cell that was cut short has left some in flight: the component goes then
                ds.let_go_of_whole(self.engine.optimizer)
        self._hide()

    def pause(self) -> None:
        if not self.entered:
            return
        if self.calls.busy:
            raise NotSupported(sentences.MIDST)
        if self.has_another_layer():
            raise NotSupported(sentences.ANOTHER_LAYER)
        self.entered = False
        self.surroundings.close()
        self.calls.pause()
        self.weights.follow_edits(self.trained)
        self.gradients.pause()
        if self.stage == 3:
            ds.let_go_of_whole(self.engine.optimizer)
        self._hide()

    def _hide(self) -> None:
        """Attachments off; parameters and state as the notebook knows them."""
        self.attachments.take_off()
        self.weights.show(self.parameters)
        if isinstance(self.inner, Inner):
            self.state.show()

    def _put_on(self) -> None:
        self.attachments.put_back()
        self.weights.put_back(self.parameters)

    def let_go(self) -> Callable[[], Prepared | None]:
        return let_go(self)

    def has_another_layer(self) -> bool:
        """One that stage 3 has not cut up."""
        known = {id(p) for p in self.parameters}
        return self.stage == 3 and any(id(p) not in known for p in self.component.parameters())

    def tell_of_layers(self, error: Exception) -> None:
        """DeepSpeed has not found what it hangs on parameters."""
        if isinstance(error, AttributeError) and self.has_another_layer():
            raise NotSupported(sentences.ANOTHER_LAYER) from error

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Of the engine: parameters are what DeepSpeed takes them for."""
        self.reader.aside()
        try:
            yield
        finally:
            self.reader.back()

    # -- the loop ------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        return self.gradients.skipped

    def backward(self) -> AbstractContextManager[float]:
        """Around a backward: yields what the loss is to be multiplied by; what DeepSpeed cannot do is said in words."""
        return self.gradients.backward()

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """`clip_grad_value_`: refused where these are the engine's."""
        mine = {id(p) for p in self.trained}
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
        yield from self.weights.pieces(self.parameters)
        if isinstance(self.inner, Inner):
            yield from self.state.pieces(self.trained)

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.stage == 3 or self.precision in LOW:
            return
        for where, module in self.component.modules.items():
            for name, p in module.named_parameters():
                yield f"{where}.{name}", p

    # -- the end -------------------------------------------------------------------------

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer is self.user and held_by(optimizer) == self.held

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.knows(optimizer) and (optimizer is self.user or not held_by(optimizer).isdisjoint(self.held)):
            sentence = sentences.OTHER_GROUPS if optimizer is self.user else sentences.ANOTHER_OPTIMIZER
            raise NotSupported(sentence.format(name=type(optimizer).__name__))

    def grow(self, component: Component) -> bool:
        """Schedulers hold the optimizer that they always held. One that the cell makes takes the other's place, and one
        that gets more parameters its own."""
        same = (
            component.modules.keys() == self.component.modules.keys()
            and all(component.modules[name] is module for name, module in self.component.modules.items())
            and not component.loose
        )
        if same and list(map(id, component.optimizers.values())) == [id(self.user)] and self.knows(self.user):
            self.component = component
            return True
        if not same or self.gradients.aside is None or not component.optimizers:
            return False
        name = [*component.optimizers][-1]
        chosen = replace(component, optimizers={name: component.optimizers[name]})
        user = self._check(chosen)
        used = self.gradients.used_up()
        self.close()
        component.optimizers, self.component, self.user = chosen.optimizers, component, user
        self._build()
        self.gradients.go_on(used)
        return True

    @torch.no_grad()
    def close(self) -> None:
        """One tensor at a time: what is gathered becomes the parameter's own."""
        if self.gradients.held:
            raise NotSupported(sentences.HELD)
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
        self.weights.own(self.parameters)
        self._part()

    def _part(self) -> None:
        """From the engine: not collective."""
        engine = self.engine
        self.gradients.close()
        with quiet(), suppress(Exception):
            destroy(engine)
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None
        if self.folder is not None:
            self.folder.close()
            self.folder = None
        self.state.shown.clear()
        del self.engine, self.core, self.layout, self.weights


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """ids of parameters"""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _quiet_steps(optimizer: Any) -> Any:
    """DeepSpeed's own optimizer steps once per piece: torch's hooks are not to see that."""
    plain = unhooked(type(optimizer))
    optimizer.step = lambda *args, **kwargs: plain(optimizer, *args, **kwargs)
    return optimizer
