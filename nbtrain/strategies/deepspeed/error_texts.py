"""What a user reads about DeepSpeed: what its engine cannot take, what a loop may not do, and what to write instead."""

from __future__ import annotations

import re

import torch

from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import config

BY_HAND = (
    "a gradient was assigned by hand, and under deepspeed the engine holds the gradients: take the strategy ddp for "
    "loops that make their own (torch.autograd.grad, edited gradients)"
)

SPENT = (
    "under deepspeed stage 3 a forward can be used by one backward only: weights are gathered for its layers once. "
    "retain_graph, gradient penalties (create_graph) and models whose outputs hide their tensors in objects work under "
    "stages 1 and 2, and under the strategy ddp"
)

OTHER_WEIGHTS = (
    "torch.func.functional_call with other weights than the model's own: under deepspeed stage 3 the engine gathers "
    "these for each layer. Take --stage 2, or --strategy ddp"
)

MIDST = (
    "save(), load() or setup() in the middle of a model's forward or backward, where under deepspeed the engine is at "
    "work: write it between loss.backward() and the next forward, or take the strategy ddp"
)

HELD = (
    "setup(), load() or a new optimizer between loss.backward() and optimizer.step(): the model would be set up anew, "
    "and the gradients that DeepSpeed's engine holds would be lost. Write it after optimizer.step(), or take the "
    "strategy ddp"
)

NOT_ZEROED = (
    "the last step's gradients were not set to None or zero: in one process they would be stepped once more, or new "
    "ones added to them, and under deepspeed the engine has forgotten them: call optimizer.zero_grad() in each step, "
    "or take the strategy ddp"
)

SOME_SET_TO_NONE = (
    "the gradients of some parameters were set to None, and DeepSpeed's engine holds all of them together: "
    "freeze parameters with requires_grad_(False) in a cell before, or take the strategy ddp"
)

THAWED = (
    "requires_grad was changed inside of the cell, and DeepSpeed's engine was set up for what it was "
    "before: freeze or thaw layers in a cell of their own, or take the strategy ddp"
)

CLIPPED = (
    "a backward between clip_grad_norm_ and the step: under deepspeed stage 1 clipped gradients are reduced already. "
    "Clip once, right before the step, or take --stage 2, or the strategy ddp"
)

ANOTHER_LAYER = (
    "the cell has put another layer into a model that it trains, which DeepSpeed's engine of stage 3 does not know: "
    "make the layer and its optimizer in a cell before, which is not distributed, or take --strategy ddp"
)

ANOTHER_OPTIMIZER = (
    "{name} is to step weights that another optimizer steps, the last that was made for them, and DeepSpeed's engine "
    "has one optimizer: join them into one with several groups, or take --strategy ddp"
)

OTHER_GROUPS = (
    "{name} holds other parameters than those that DeepSpeed's engine was set up for: write "
    "optimizer.add_param_group(...) for what is to come, change optimizer.param_groups otherwise in a cell that is not "
    "distributed, before this one, or take --strategy ddp"
)

SOME_CLIPPED = (
    "clip_grad_norm_ of some of an optimizer's parameters: DeepSpeed clips all that one optimizer trains "
    "by their common norm; clip model.parameters(), or take the strategy ddp"
)

CLIPPED_TWICE = (
    "clip_grad_norm_ of a list that has a parameter twice: torch counts its gradient twice, and DeepSpeed's engine has "
    "it once; leave the second out, or take the strategy ddp"
)

OTHER_NORM = (
    "clip_grad_norm_(norm_type={norm_type:g}): DeepSpeed knows the 2-norm alone: leave norm_type out, or use "
    "--strategy ddp"
)


def without_gradient(names: list[str]) -> str:
    """A warning: these parameters were not reached in this step."""
    who = ", ".join(names[:3]) or "a layer that no model holds"
    return (
        f"{who}{', …' if len(names) > 3 else ''} got no gradient in this step, and DeepSpeed "
        "steps such parameters with zeros: weight decay and earlier momentum move them, which in one process "
        "they would not"
    )


def not_finite(stage: int) -> str:
    """A warning: this step was left out."""
    more = (
        "; under stage 3 weights have no content outside of the model's forward: is a penalty on them computed there?"
        if stage == 3
        else ""
    )
    return f"gradients were not finite, and DeepSpeed leaves such a step out{more}"


def of_backward(error: BaseException, stage: int) -> str | None:
    """What a backward failed with, in the user's words; None: it is not DeepSpeed's."""
    if stage == 3 and "single memory location" in str(error):  # added to a stand-in
        return SPENT
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    frames = [name.replace("\\", "/") for name in frames]
    # What a hook of the user's raises, or a handler of a signal (of a loader's worker that died), passes through
    # DeepSpeed, too.
    its_own = re.search("/(deepspeed|torch(?!/utils/data))/", frames[-1])
    if not its_own or not any("/deepspeed/runtime/" in name for name in frames):
        return None
    first = str(error).partition("\n")[0]
    return (
        f"DeepSpeed cannot follow this backward under stage {stage} ({type(error).__name__}: {first}). The plain loop, "
        "accumulation and several models work; other ways through the graph work under the strategy ddp"
    )


def in_single(component: Component) -> None:
    """DeepSpeed steps a copy of the weights in float32."""
    for name, p in component.named_parameters():
        if p.dtype == torch.float64 or p.is_complex():
            raise NotSupported(
                f"{name} is {str(p.dtype).removeprefix('torch.')}, and DeepSpeed steps weights and the optimizer's "
                "state in float32: write --strategy ddp, or make the model float32 (model.float()) in a cell before"
            )


def one_optimizer(component: Component, settings: config.Settings) -> torch.optim.Optimizer:
    """The user's, of parameters that the engine knows."""
    if len(component.optimizers) > 1:
        raise NotSupported(
            f"{' and '.join(component.optimizers)} train parameters of the same model, and DeepSpeed's engine has "
            "one optimizer: join them into one with several groups, or, where a new one takes the place of the other, "
            "make it and the layers that it is for in a cell before, which is not distributed, or take --strategy ddp"
        )
    if component.loose:
        raise NotSupported(
            f"{', '.join(component.loose)}: the optimizer holds parameters that no module owns, and DeepSpeed's "
            "engine knows those of a model only: make them nn.Parameters of the model (if they are of a layer that was "
            "taken out of it, make the optimizer anew, in a cell that is not distributed), or take the strategy ddp"
        )
    (user,) = component.optimizers.values()
    if settings.get("scheduler") and component.schedulers:
        raise NotSupported(
            f"the config has a scheduler, and so has the notebook ({', '.join(component.schedulers)}): leave one out"
        )
    return user
