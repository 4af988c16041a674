"""DeepSpeed's engine for one component and what belongs to it: built together, and anew when the component changes."""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter, eq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.compat import optimizers
from nbtrain.compat.intercept import original
from nbtrain.compat.pytree import tree_map
from nbtrain.compat.training_libraries import DEEPSPEED
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import compiled_ops, config, error_texts
from nbtrain.strategies.deepspeed.attachments import Attachments
from nbtrain.strategies.deepspeed.engine_layout import EngineLayout
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer, can_be_fused
from nbtrain.strategies.deepspeed.library import COLLAPSED, as_local_rank, equal_already, library
from nbtrain.strategies.deepspeed.loss_scale import LossScale
from nbtrain.strategies.deepspeed.optimizer_state import EngineOptimizerState
from nbtrain.strategies.deepspeed.quiet import quiet
from nbtrain.strategies.deepspeed.weights import EngineWeights, Shapes, unreadable
from nbtrain.strategies.kit.call_router import call_plainly
from nbtrain.strategies.kit.component_tensors import parameters_of

TRAINABLE = attrgetter("requires_grad")
LOW = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
NVME_PREFIX = "nbtrain-"


@dataclass(eq=False, repr=False, kw_only=True)
class EngineParts:
    """`entered`, `inside` and `meanwhile` change with what runs, and `component` where a cell adds a scheduler."""

    component: Component
    user: torch.optim.Optimizer
    held: set[int]
    """ids of the parameters in its groups"""
    settings: config.Settings
    stage: int
    precision: str
    loss_scale: LossScale
    models: list[nn.Module]
    shapes: Shapes
    parameters: list[torch.Tensor]
    requires: list[bool]
    """which of them require gradients"""
    trained: list[torch.Tensor]
    device: torch.device
    attachments: Attachments
    core: WrappedModule
    inner: Any
    """the optimizer that the engine steps: an `InnerOptimizer`, or one of the config's"""
    sources: list[int]
    engine: Any
    layout: EngineLayout
    state: EngineOptimizerState
    weights: EngineWeights
    folder: TemporaryDirectory[str] | None
    entered: bool = False
    """a cell runs"""
    inside: bool = False
    """a call goes through the engine"""
    meanwhile: Any = None
    """what is to be put back once nobody but the engine is known to hold the models: see `release_modules`"""

    def has_another_layer(self) -> bool:
        """Whether the cell has put a layer into a model that stage 3 has not cut up."""
        known = {id(p) for p in self.parameters}
        return self.stage == 3 and any(id(p) not in known for p in self.component.parameters())

    def tell_of_layers(self, error: Exception) -> None:
        """Says so where DeepSpeed has not found what it hangs on parameters."""
        if isinstance(error, AttributeError) and self.has_another_layer():
            raise NotSupported(error_texts.ANOTHER_LAYER) from error

    def check_frozen(self) -> None:
        if not all(map(eq, map(TRAINABLE, self.parameters), self.requires)):
            raise NotSupported(error_texts.THAWED)

    def show_rates(self) -> None:
        """Learning rates that a scheduler of the config's has moved are shown in the user's groups, and come home."""
        for group, number in zip(self.engine.optimizer.param_groups, self.sources, strict=True):
            shown = self.user.param_groups[number]
            shown.update({name: group[name] for name in ("lr", "betas", "momentum") if name in group and name in shown})


def build(
    component: Component,
    user: torch.optim.Optimizer,
    settings: config.Settings,
    precision: str,
    loss_scale: LossScale,
    place: str,
    device: torch.device,
    models: list[nn.Module],
    shapes: Shapes,
    notes: list[str],
) -> EngineParts:
    """`place`: the folder for what goes to nvme. `notes`: what the user should know is added to them."""
    stage: int = settings["zero_optimization"]["stage"]
    parameters = component.parameters()  # a cell may put another layer into the model
    requires = [p.requires_grad for p in parameters]
    keys = set(map(id, parameters_of(user)))
    trained = trained_by(user)
    if not trained:
        raise NotSupported("nothing that the optimizer holds requires gradients: there is nothing to train")
    deepspeed = library(device)
    folder = _offload_to_disk(deepspeed, settings, place, notes)
    own = not settings.get("optimizer")
    _configure_activations(deepspeed, settings)

    attachments = Attachments(modules_of(component), parameters)
    for p in parameters:
        p.grad = None
        if stage == 3:
            setattr(p, COLLAPSED, unreadable(p, LOW.get(precision)))
    frozen: dict[int, torch.Tensor] = {}
    if precision in LOW:
        kept = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
        frozen = {id(p): p.data.clone() for p in kept}
    core = WrappedModule(models, precision, device, stage != 3)
    mine = set(map(id, trained))
    inner: Any = InnerOptimizer.make(user, lambda p: id(p) in mine)
    sources = inner.sources
    offloaded = config.offload(settings, "offload_optimizer") != "none"
    if own and (device.type == "cuda" or offloaded) and can_be_fused(user):
        inner.overrides["fused"] = True  # what FusedAdam and DeepSpeedCPUAdam would be, without compiling
        inner.take_options()
        notes.append(f"{type(user).__name__} steps this rank's share with torch's fused kernel")
    with quiet(), equal_already(), as_local_rank(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, inner = _initialize(core, inner, _fitted(settings, trained), own)
    if not own:
        kind = settings["optimizer"].get("type")
        notes.append(
            f"the config's {kind} trains, with its own learning rate; {type(user).__name__} is what step() is "
            f"called on, and its state stays as it is"
        )
    layout = EngineLayout(engine, stage)
    state = EngineOptimizerState(user, inner, layout)
    if own:
        inner.layout = layout
        state.take()
    weights = EngineWeights(layout, attachments, shapes, frozen, parameters)
    return EngineParts(
        component=component, user=user, held=keys, settings=settings, stage=stage, precision=precision,
        loss_scale=loss_scale, models=models, shapes=shapes, parameters=parameters, requires=requires, trained=trained,
        device=device, attachments=attachments, core=core, inner=inner, sources=sources,
        engine=engine, layout=layout, state=state, weights=weights, folder=folder,
    )  # fmt: skip


def _offload_to_disk(
    deepspeed: Any, settings: config.Settings, place: str, notes: list[str]
) -> TemporaryDirectory[str] | None:
    if "nvme" not in {config.offload(settings, "offload_param"), config.offload(settings, "offload_optimizer")}:
        return None
    compiled_ops.load(deepspeed, "AsyncIOBuilder")
    places = [section.get("nvme_path") for _, section in config.sections(settings)]
    folder = _nvme_folder(place or next(filter(None, places)))
    for _, section in config.sections(settings):
        section["nvme_path"] = folder.name
    notes.append("what is smaller than 1 MiB on a rank stays in memory: DeepSpeed does not swap it to nvme")
    return folder


def _configure_activations(deepspeed: Any, settings: config.Settings) -> None:
    """For a model that calls `deepspeed.checkpointing.checkpoint` itself."""
    section = settings.get("activation_checkpointing") or {}
    with quiet():
        deepspeed.checkpointing.configure(
            None,
            partition_activations=bool(section.get("partition_activations")),
            checkpoint_in_cpu=bool(section.get("cpu_checkpointing")),
            contiguous_checkpointing=section.get("contiguous_memory_optimization"),
            num_checkpoints=section.get("number_checkpoints"),
        )


def _fitted(settings: config.Settings, trained: list[torch.Tensor]) -> config.Settings:
    """Under stage 3 a bucket larger than everything is only memory, and DeepSpeed would replace torch's function of a
    linear layer for good: `library.linear` does, while its cells run."""
    zero = settings["zero_optimization"]
    if zero["stage"] != 3:
        return settings
    total = max(2, sum(p.numel() for p in trained))
    fitted = {"reduce_bucket_size": min(zero["reduce_bucket_size"], total), "memory_efficient_linear": False}
    return {**settings, "zero_optimization": {**zero, **fitted}}


def _initialize(core: WrappedModule, inner: Any, settings: config.Settings, own: bool) -> tuple[Any, Any]:
    """The engine, and the optimizer that it steps."""
    make = original(DEEPSPEED)
    if own:
        engine, *_ = make(model=core, optimizer=inner, config={**settings, "zero_allow_untested_optimizer": True})
        return engine, inner
    groups = [{"params": group["params"]} for group in inner.param_groups]
    engine, *_ = make(model=core, model_parameters=groups, config=settings)
    optimizer = engine.basic_optimizer
    step = optimizers.unhooked(type(optimizer))  # it steps once per piece: torch's hooks are not to see that
    optimizer.step = lambda *args, **kwargs: step(optimizer, *args, **kwargs)
    return engine, optimizer


def modules_of(component: Component) -> list[nn.Module]:
    """All modules of its models, each once."""
    return list({id(m): m for model in component.modules.values() for m in model.modules()}.values())


def trained_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for p in parameters_of(optimizer) if p.requires_grad and p.numel()]


class WrappedModule(nn.Module):
    """What the engine is given for the model: runs whichever call is made of the user's models, in the precision that
    was asked for."""

    def __init__(self, models: list[nn.Module], precision: str, device: torch.device, full: bool) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.target: nn.Module | None = None
        """the model that is being called"""
        self.low = LOW.get(precision)
        self.mixed = MIXED.get(precision, self.low)  # what has kept its 32 bits (buffers) meets what has not
        self.device_type = device.type
        self.cache = full  # a cast that autocast keeps would outlive the gathered parameter it was made of

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


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _nvme_folder(place: str) -> TemporaryDirectory[str]:
    """One per engine and process. DeepSpeed leaves its files behind: here they go when the engine does, at the latest
    when the process ends; what a killed process has left is removed by the next engine that uses the same place."""
    try:
        os.makedirs(place, exist_ok=True)
        _sweep(Path(place))
        prefix = f"{NVME_PREFIX}{os.getpid()}-"
        return TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"--nvme-path {place}: {error.strerror}") from None


def _sweep(place: Path) -> None:
    for left in place.glob(f"{NVME_PREFIX}*-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not _is_alive(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
