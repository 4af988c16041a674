"""One component behind one of DeepSpeed's engines: set up, entered and left, and whole again at the end.

The engine is given a `Core` that holds the component's models and runs whichever call is made of them; the models'
calls take a road through it (see route.py). The optimizer it steps is an `Inner` one (see inner.py). What happens
between `loss.backward()` and `optimizer.step()` is in gradients.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from nbtrain.errors import NotSupported
from nbtrain.strategies._deepspeed import config, ops
from nbtrain.strategies._deepspeed.attachments import Attachments
from nbtrain.strategies._deepspeed.dicts import whole_dicts, whole_state
from nbtrain.strategies._deepspeed.disk import Folder
from nbtrain.strategies._deepspeed.gradients import Gradients, in_backward, unreadable
from nbtrain.strategies._deepspeed.inner import CpuAdam, Inner, adam_kind, check, unhooked
from nbtrain.strategies._deepspeed.library import COLLAPSED, as_local_rank, destroy, library, quiet
from nbtrain.strategies._deepspeed.scaling import LossScale
from nbtrain.strategies._deepspeed.shares import Layout, Part, stretch
from nbtrain.strategies._deepspeed.state import State
from nbtrain.strategies.base import Component, Prepared
from nbtrain.strategies.route import call_plainly, route, unroute

MANAGERS = "_backward_hook_managers"
LOW = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Core(nn.Module):
    """What the engine takes for the model."""

    def __init__(self, models: list[nn.Module], precision: str, device: torch.device, whole: bool) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.target: nn.Module | None = None
        self.low = LOW.get(precision)
        self.mixed = MIXED.get(precision, self.low)  # what has kept its 32 bits (buffers) meets what has not
        self.device_type = device.type
        self.cache = whole  # a cast that autocast keeps would outlive the gathered parameter it was made of

    def forward(self, name: str, args: Any, kwargs: Any) -> Any:
        assert self.target is not None
        if self.low is not None:
            args, kwargs = tree_map(lambda t: _cast(t, self.low), (args, kwargs))
        context: AbstractContextManager[Any] = nullcontext()
        if self.mixed is not None:
            context = torch.autocast(self.device_type, dtype=self.mixed, cache_enabled=self.cache)
        with context:
            out = call_plainly(self.target, name, args, kwargs)
        low = self.mixed
        out = tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and t.dtype == low else t, out)
        return (out,)  # stage 3 looks for tensors in it, and cannot take a number


class Engined(Prepared):
    """`skipped`: steps left out because a gradient was infinite."""

    def __init__(
        self, component: Component, settings: config.Settings, precision: str, scale: LossScale, place: str
    ) -> None:
        super().__init__(component)
        self.settings, self.precision, self.loss_scale, self.place = settings, precision, scale, place
        self.stage: int = settings["zero_optimization"]["stage"]
        self.entered = False
        self.inside = False
        self.outputs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """of models, on which DeepSpeed has put something that is not the notebook's"""
        self.kernel: CpuAdam | None = None
        self.folder: Folder | None = None
        self.user = self._one_optimizer()
        self.models = _outermost(component.modules.values())
        self.shapes = {id(p): (p.shape, p.dtype) for p in component.parameters()}
        self._build()

    # -- set-up --------------------------------------------------------------------------

    def _one_optimizer(self) -> torch.optim.Optimizer:
        component = self.component
        if len(component.optimizers) > 1:
            raise NotSupported(
                f"{' and '.join(component.optimizers)} train parameters of the same model, and DeepSpeed's engine has "
                "one optimizer: join them into one with several groups, or take the strategy ddp"
            )
        if component.loose:
            raise NotSupported(
                f"{', '.join(component.loose)}: the optimizer holds parameters that no module owns, and DeepSpeed's "
                "engine knows those of a model only: make them nn.Parameters of the model, or take the strategy ddp"
            )
        (user,) = component.optimizers.values()
        if self.settings.get("scheduler") and component.schedulers:
            raise NotSupported(
                f"the config has a scheduler, and so has the notebook ({', '.join(component.schedulers)}): "
                "leave one out"
            )
        if not self.settings.get("optimizer") and (note := check(user)):
            self.notes.append(note)
        return user

    def _build(self) -> None:
        component, settings = self.component, self.settings
        parameters = component.parameters()
        self.device = parameters[0].device
        self.requires = [p.requires_grad for p in parameters]
        self.trained = [p for g in self.user.param_groups for p in g["params"] if p.requires_grad and p.numel()]
        if not self.trained:
            raise NotSupported("nothing that the optimizer holds requires gradients: there is nothing to train")
        first = dist.get_rank() == 0
        deepspeed = self.deepspeed = library(self.device)
        wanted = {config.offload(settings, "offload_param"), config.offload(settings, "offload_optimizer")}
        if "nvme" in wanted:
            ops.load(deepspeed, "AsyncIOBuilder", first)
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
            self.kernel = CpuAdam(ops.load(deepspeed, "CPUAdamBuilder", first), decoupled)
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
        self.frozen: dict[int, torch.Tensor] = {}
        if self.precision in LOW:
            frozen = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
            self.frozen = {id(p): p.data.clone() for p in frozen}
        self.core = Core(self.models, self.precision, self.device, self.stage != 3)
        mine = set(map(id, self.trained))
        self.inner = Inner.make(self.user, lambda p: id(p) in mine)
        self.inner.kernel = self.kernel
        self.sources = self.inner.sources
        if own and self.device.type == "cuda" and decoupled is not None and self.kernel is None:
            self._fuse()
        with quiet(), as_local_rank(self.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine = self._initialize(deepspeed, own)
        if not own:
            kind = settings["optimizer"].get("type")
            self.notes.append(
                f"the config's {kind} trains, with its own learning rate; {type(self.user).__name__} is what step() is "
                f"called on, and its state stays as it is"
            )
        self.layout = Layout(self.engine, self.stage)
        self.state = State(self.user, self.inner, self.layout)
        if own:
            self.state.take()
            if self.state.uneven:
                self.notes.append("parameters that have taken different numbers of steps count the same from now on")
        if self.stage == 3:
            for p in parameters:
                self._cut_frozen(p)
        self.gradients = Gradients(self)
        for module in modules:
            if not any(module is model for model in component.modules.values()):
                module.register_forward_pre_hook(self._check_call)
        self.attachments.find()
        self.data: dict[int, torch.Tensor] = {}
        self._hide()

    def _initialize(self, deepspeed: Any, own: bool) -> Any:
        settings = self.settings
        if self.stage == 3:  # a bucket larger than everything is only memory
            zero = settings["zero_optimization"]
            total = max(2, sum(p.numel() for p in self.trained))
            settings = {
                **settings,
                "zero_optimization": {**zero, "reduce_bucket_size": min(zero["reduce_bucket_size"], total)},
            }
        if own:
            engine, *_ = deepspeed.initialize(model=self.core, optimizer=self.inner, config=settings)
        else:
            groups = [{"params": group["params"]} for group in self.inner.param_groups]
            engine, *_ = deepspeed.initialize(model=self.core, model_parameters=groups, config=settings)
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

    def _cut_frozen(self, p: Any) -> None:
        whole = self.frozen.get(id(p))
        if whole is not None:
            start, stop = stretch(p)
            self.frozen[id(p)] = whole.reshape(-1)[start:stop].clone()

    # -- a cell --------------------------------------------------------------------------

    def enter(self) -> None:
        if self.entered:
            return
        if [p.requires_grad for p in self.component.parameters()] != self.requires:
            self.close()
            self._build()
        if isinstance(self.inner, Inner):
            self.state.take()
        self._put_on()
        self.gradients.enter()
        self.surroundings = ExitStack()
        self.surroundings.enter_context(as_local_rank(self.device))  # stage 3 looks for it in its forward
        if self.stage == 3:
            for handle in whole_dicts(self.models, self.deepspeed.zero.GatheredParameters, self._load):
                self.surroundings.callback(handle.remove)
        if isinstance(self.inner, Inner):
            for handle in whole_state(self.state, self.device):
                self.surroundings.callback(handle.remove)
        for module in self.component.modules.values():
            route(module, self._through, self._apart)
        self.entered = True

    def leave(self) -> None:
        if not self.entered:
            return
        self.entered = self.inside = False
        self.surroundings.close()
        for module in self.component.modules.values():
            unroute(module)
        for out in self.outputs.values():
            vars(out).pop(MANAGERS, None)
        self.outputs.clear()
        self.gradients.follow_edits()
        self.gradients.leave()
        if self.stage == 3:
            with suppress(Exception):  # a cell that was cut short has left some in flight: the component goes then
                self.engine.optimizer._partition_all_parameters()
        self._hide()

    def _hide(self) -> None:
        """Attachments off; parameters and state as the notebook knows them."""
        self.attachments.take_off()
        for p in self.component.parameters():
            shape, dtype = self.shapes[id(p)]
            keep = self.stage != 3 and p.dtype == dtype
            if keep:
                continue
            self.data[id(p)] = p.data
            if self.stage != 3 and id(p) in self.frozen:
                p.data = self.frozen[id(p)]
            else:
                p.data = torch.zeros((), dtype=dtype, device=p.device).expand(shape)
        if isinstance(self.inner, Inner):
            self.state.show()

    def _put_on(self) -> None:
        self.attachments.put_back()
        for p in self.component.parameters():
            if (data := self.data.pop(id(p), None)) is not None:
                if self.stage != 3 and id(p) in self.frozen:
                    data.copy_(p.data)  # the notebook may have written to it
                p.data = data

    def _through(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        if self.inside or not self.entered:
            return call_plainly(module, name, args, kwargs)
        if in_backward():
            if any(module is model for model in self.models):
                raise NotSupported(
                    f"{type(module).__name__} as a whole is recomputed in the backward, and DeepSpeed's engine has to "
                    "see its forward: checkpoint its blocks instead of all of it, or take the strategy ddp"
                )
            return call_plainly(module, name, args, kwargs)
        self.inside = True
        self.core.target = module
        try:
            (out,) = self.engine(name, args, kwargs)
            tree_map(self._note_output, out)
            return out
        finally:
            self.inside = False
            self.core.target = None

    def _note_output(self, out: Any) -> None:
        if hasattr(out, MANAGERS):
            self.outputs[id(out)] = out

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """While a model is copied (an average of its weights is kept so): the copy is to be a plain one."""
        if self.stage == 3:
            raise NotSupported(
                "a copy of the model inside of the cell would have no weights: under stage 3 they are in pieces. Copy "
                "it in a cell that is not distributed, or take stage 2"
            )
        grads = [p.grad for p in self.trained]
        self.attachments.take_off()
        try:
            yield
        finally:
            self.attachments.put_back()
            for p, grad in zip(self.trained, grads, strict=True):
                p.grad = grad

    def _check_call(self, module: nn.Module, args: Any) -> None:
        if self.inside or not self.entered or not torch.is_grad_enabled() or in_backward():
            return
        raise NotSupported(
            f"{type(module).__name__} is a part of a model and was called directly, past DeepSpeed's engine, which "
            "would not see its gradients: put the call into a method of the model and call that, or take the strategy "
            "ddp"
        )

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

    def pieces(self) -> Iterator[tuple[torch.Tensor, Part]]:
        parameters = self.component.parameters()
        for p in parameters:
            piece = self._piece(p)
            if piece is not None:
                yield p, piece
        if isinstance(self.inner, Inner):
            yield from self.state.pieces(self.trained)

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.stage == 3 or self.precision in LOW:
            return
        for where, module in self.component.modules.items():
            for name, p in module.named_parameters():
                yield f"{where}.{name}", p

    def _piece(self, p: Any) -> Part | None:
        shape, dtype = self.shapes[id(p)]
        share = self.layout.shares.get(id(p))
        if share is None:
            return self._frozen_piece(p) if self.stage == 3 else None
        size = share.stop - share.start
        number = share.flat

        def master() -> torch.Tensor:
            return self.layout.flats[number].data.narrow(0, share.at, size)

        def read() -> torch.Tensor:
            with self.state._at_hand(number, write=False):
                return master().clone() if self.layout.swapped(number) else master()

        def fill(whole: torch.Tensor) -> None:
            with self.state._at_hand(number):
                master().copy_(whole[share.start : share.stop])
            self._fill_model(p, whole)

        return Part(shape, dtype, (share.start, share.stop), read, fill)

    def _frozen_piece(self, p: Any) -> Part:
        """Stage 3 cuts these up, too."""
        shape, dtype = self.shapes[id(p)]
        attributes = self.attachments.of(p)
        piece, start, stop = attributes["ds_tensor"], *self._stretch(attributes)

        def read() -> torch.Tensor:
            kept = self.frozen.get(id(p))
            return kept if kept is not None else piece.data[: stop - start]

        def fill(whole: torch.Tensor) -> None:
            if id(p) in self.frozen:
                self.frozen[id(p)].copy_(whole[start:stop])
            self._fill_model(p, whole)

        return Part(shape, dtype, (start, stop), read, fill)

    def _fill_model(self, p: Any, whole: torch.Tensor) -> None:
        """What the model computes with."""
        data = self.data.get(id(p), p.data)
        if self.stage == 3:
            attributes = self.attachments.of(p)
            start, stop = self._stretch(attributes)
            if attributes["ds_tensor"].numel():
                attributes["ds_tensor"].data[: stop - start].copy_(whole[start:stop])
            if not attributes.get("ds_persist") or attributes["ds_status"].name != "AVAILABLE":
                return
        data.copy_(whole.view(data.shape))

    @torch.no_grad()
    def _load(self, p: Any, whole: torch.Tensor) -> None:
        """In a cell, under stage 3."""
        piece = self._piece(p)
        assert piece is not None
        piece.fill(whole)
        if p.ds_status.name == "AVAILABLE":
            p.data.copy_(whole)

    @staticmethod
    def _stretch(attributes: dict[str, Any]) -> tuple[int, int]:
        size, numel = attributes["ds_tensor"].ds_numel, attributes["ds_numel"]
        start = min(size * attributes["ds_zero_partition_rank"], numel)
        return start, min(start + size, numel)

    # -- the end -------------------------------------------------------------------------

    def grow(self, component: Component) -> bool:
        """Schedulers hold the optimizer that they always held."""
        same = (
            component.modules.keys() == self.component.modules.keys()
            and all(component.modules[name] is module for name, module in self.component.modules.items())
            and list(component.optimizers.values()) == list(self.component.optimizers.values())
            and not component.loose
        )
        if same:
            self.component = component
        return same

    @torch.no_grad()
    def close(self) -> None:
        """One tensor at a time: what is gathered becomes the parameter's own."""
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
        for p in self.component.parameters():
            if id(p) not in self.data:  # a view of the engine's buffer
                p.data = p.data.clone()
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
        self.data.clear()
        self.state.shown.clear()
        del self.engine, self.core, self.layout


def _quiet_steps(optimizer: Any) -> Any:
    """DeepSpeed's own optimizer steps once per piece: torch's hooks are not to see that."""
    plain = unhooked(type(optimizer))
    optimizer.step = lambda *args, **kwargs: plain(optimizer, *args, **kwargs)
    return optimizer


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    found = list(modules)
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
