"""What a user reads about DeepSpeed: what its engine cannot take, what a loop may not do, and what to write instead."""

from __future__ import annotations

import re

import torch

from nbtrain.base.errors import NotSupported, text_of
from nbtrain.compat.modules import compiled
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import config
from nbtrain.strategies.kit.component_tensors import named_parameters

BY_HAND = (
    "a gradient was assigned by hand, and under deepspeed the engine holds the gradients: between loss.backward() and "
    "optimizer.step() write `with whole(model, gradients=True): p.grad = …`"
)

USED_UP = (
    "whole(…, gradients=True) after optimizer.step(): DeepSpeed's engine has used the gradients up. Write it between "
    "loss.backward() and optimizer.step()"
)

CLIPPED_BY_VALUE = (
    "clip_grad_value_: DeepSpeed's engine holds the gradients, in pieces. Write `with whole(model, gradients=True): "
    "nn.utils.clip_grad_value_(model.parameters(), …)`, or clip_grad_norm_"
)

SPENT = (
    "under deepspeed stage 3 a forward can be used by one backward only: weights are gathered for its layers once. "
    "retain_graph, gradient penalties (create_graph) and models whose outputs hide their tensors in objects work under "
    "stages 1 and 2, and under the strategy ddp"
)

OTHER_WEIGHTS = (
    "torch.func.functional_call with other weights than the model's own: under deepspeed stage 3 the engine gathers "
    "these for each layer. Give it a copy of the model, which is whole on every rank: "
    "`with whole(model): twin = copy.deepcopy(model)`; or take --stage 2"
)

MIDST = (
    "save(), load(), setup() or whole() in the middle of a model's forward or backward, where under deepspeed the "
    "engine is at work: write it between loss.backward() and the next forward, or take the strategy ddp"
)

HELD = (
    "a layer was frozen between loss.backward() and optimizer.step(): the step would still take its gradients, which "
    "DeepSpeed's engine does with what it trains alone. Write it after optimizer.step(), or set its gradients to None "
    "(with whole(layer, gradients=True): layer.zero_grad()) in a block before"
)

NOT_ZEROED = (
    "the last step's gradients were not set to None or zero: in one process they would be stepped once more, or new "
    "ones added to them, and under deepspeed the engine has forgotten them: call optimizer.zero_grad() in each step, "
    "or take the strategy ddp"
)

ZEROS = (
    "a gradient was zeroed in place (set_to_none=False), and no backward has reached it since: one process has zeros "
    "there, and DeepSpeed's engine holds nothing: write optimizer.zero_grad(), or take the strategy ddp"
)

THAWED = (
    "requires_grad was changed inside of the cell, and DeepSpeed's engine was set up for what it was before: write "
    "`with whole(model): layer.requires_grad_(…)`, for it to be set up again"
)

ASSIGNED = (
    "load_state_dict(assign=True) puts other parameters into the model, which DeepSpeed's engine of stage 3 and the "
    "optimizer do not know: leave assign out, or write `with whole(model, optimizer): model.load_state_dict(state, "
    "assign=True); optimizer = …(model.parameters())`"
)

ANOTHER_LAYER = (
    "the cell has put another layer into a model that it trains, which DeepSpeed's engine of stage 3 does not know: "
    "write `with whole(model, optimizer): model.head = …; optimizer = …(model.parameters())`"
)


def without_gradient(names: list[str]) -> str:
    return (
        f"{_some(names)} got no gradient in this step, and the optimizer of DeepSpeed's config steps such parameters "
        "with zeros: weight decay and earlier momentum move them, which in one process they would not. Freeze them "
        "(requires_grad_(False)) before the cell, or leave the optimizer out of the config"
    )


def without_gradient_here(names: list[str]) -> str:
    return (
        f"{_some(names)} got no gradient in this step (or it was set to None), and on another rank other parameters: "
        "DeepSpeed's engine needs the same on all. Add 0 * p.sum() of them to the loss, write optimizer.zero_grad() "
        "above `if rank == 0:`, or take the strategy ddp"
    )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


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
    if stage == 3 and "single memory location" in text_of(error):  # added to a stand-in
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
    first = text_of(error).partition("\n")[0]
    return (
        f"DeepSpeed cannot follow this backward under stage {stage} ({type(error).__name__}: {first}). The plain loop, "
        "accumulation and several models work; other ways through the graph work under the strategy ddp"
    )


COMPILED = (
    "a compiled model (torch.compile) was made in the notebook, and DeepSpeed's stage 3 cannot be set up for it: write "
    "compiled = torch.compile(model) in the cell, or take --stage 2"
)


def in_single(component: Component) -> None:
    """DeepSpeed steps a copy of the weights in float32."""
    for name, p in named_parameters(component):
        if p.dtype == torch.float64 or p.is_complex():
            raise NotSupported(
                f"{name} is {str(p.dtype).removeprefix('torch.')}, and DeepSpeed steps weights and the optimizer's "
                "state in float32: write --strategy ddp, or make the model float32 (model.float()) in a cell before"
            )


def one_optimizer(component: Component, settings: config.Settings) -> torch.optim.Optimizer:
    """The user's, of parameters that the engine knows."""
    if len(component.optimizers) > 1:
        made = any("#" in name for name in component.optimizers)  # in the cell: no name of the notebook has that
        anew = (
            ", where a new one takes the place of the other, make it and the layers that it is for in `with "
            "whole(model, optimizer): …`"
        )
        raise NotSupported(
            f"{' and '.join(component.optimizers)} train parameters of the same model, and DeepSpeed's engine has "
            f"one optimizer: join them into one with several groups, or{anew if made else ' take the strategy ddp'}"
        )
    if settings["zero_optimization"]["stage"] == 3 and any(
        compiled(model) is not None for model in component.modules.values()
    ):
        raise NotSupported(COMPILED)
    if component.loose:
        raise NotSupported(
            f"{', '.join(component.loose)}: the optimizer holds parameters that no module owns, and DeepSpeed's "
            "engine knows those of a model only: make them nn.Parameters of the model (if they are of a layer that was "
            "taken out of it, make layer and optimizer anew in `with whole(model, optimizer): …`), or take the "
            "strategy ddp"
        )
    (user,) = component.optimizers.values()
    if settings.get("scheduler") and component.schedulers:
        raise NotSupported(
            f"the config has a scheduler, and so has the notebook ({', '.join(component.schedulers)}): leave one out"
        )
    return user
