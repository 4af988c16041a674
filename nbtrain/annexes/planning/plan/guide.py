"""Which strategy suits which goal: rows of data for the plan, `auto` and the advice after running out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GOALS = ("speed", "batch", "model")
"""What the user wants: the fastest steps, the largest batch or the largest model."""
LOSSES = ("no", "small", "any")
"""How much speed may be lost for it."""

RECOMPUTE = "--checkpoint-activations"

DIVIDES = "divides everything, and gathers each layer when it computes"
AGAIN = "computes activations again in the backward, about a third more work"
OFFLOADS = "keeps everything in main memory, and steps there"
OFFLOADS_AGAIN = "keeps everything in main memory and computes activations again"


@dataclass(frozen=True, slots=True)
class TrainingWay:
    """A strategy or a preset, with or without activation checkpointing."""

    name: str
    """name of the strategy or the preset"""
    why: str
    """what it saves and costs: completes a sentence that begins with its name"""
    recompute: bool = False


ORDER: tuple[TrainingWay, ...] = (
    TrainingWay("single", "sends nothing"),
    TrainingWay("ddp", "is the fastest on several devices, as it gathers no weights"),
    TrainingWay("sharded", "keeps a gradient and its optimizer's state on one rank"),
    TrainingWay("zero1", "divides the optimizer's state among the ranks"),
    TrainingWay("deepspeed_stage_1", "divides the optimizer's state among the ranks"),
    TrainingWay("deepspeed_stage_2", "divides the optimizer's state and the gradients among the ranks"),
    TrainingWay("fsdp_shard_grad_op", "divides all but the weights that compute, which are gathered once a step"),
    TrainingWay("fsdp", DIVIDES),
    TrainingWay("deepspeed_stage_3", DIVIDES),
    TrainingWay("single", AGAIN, recompute=True),
    TrainingWay("ddp", AGAIN, recompute=True),
    TrainingWay("deepspeed_stage_2", "divides optimizer's state and gradients, and computes activations again",
                recompute=True),
    TrainingWay("fsdp", "divides everything and computes activations again", recompute=True),
    TrainingWay("deepspeed_stage_3", "divides everything and computes activations again", recompute=True),
    TrainingWay("deepspeed_stage_2_offload", "keeps the optimizer's state in main memory, and steps there"),
    TrainingWay("fsdp_cpu_offload", OFFLOADS),
    TrainingWay("deepspeed_stage_3_offload", OFFLOADS),
    TrainingWay("fsdp_cpu_offload", OFFLOADS_AGAIN, recompute=True),
    TrainingWay("deepspeed_stage_3_offload", OFFLOADS_AGAIN, recompute=True),
)  # fmt: skip
"""Fastest first. `auto`, and a plan for speed, take the first that fits."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What the guide recommends for one goal and loss."""

    ways: tuple[str, ...]
    """names of ways, the first choice first"""
    why: str
    recompute: bool = False
    """activation checkpointing is used as well"""


GUIDE: Mapping[tuple[str, str], Advice] = {
    ("batch", "no"): Advice(
        ("sharded", "deepspeed_stage_2", "zero1"),
        "what is not held twice leaves room for samples, and little more is sent than under ddp",
    ),
    ("batch", "small"): Advice(
        ("fsdp", "deepspeed_stage_3", "deepspeed_stage_2", "sharded", "zero1"),
        "dividing the weights, too, leaves the most room for samples; a layer is gathered when it computes",
    ),
    ("batch", "any"): Advice(
        ("fsdp", "deepspeed_stage_3", "ddp", "single"),
        "activations grow with the batch, so computing them again saves the most",
        recompute=True,
    ),
    ("model", "no"): Advice(
        ("deepspeed_stage_2", "sharded", "zero1"),
        "gradients and the optimizer's state are divided, and little more is sent than under ddp",
    ),
    ("model", "small"): Advice(
        ("fsdp", "deepspeed_stage_3", "deepspeed_stage_2"),
        "weights, gradients and optimizer state are divided, so the model may grow with the number of ranks",
    ),
    ("model", "any"): Advice(
        ("deepspeed_stage_3_offload", "fsdp_cpu_offload", "fsdp", "deepspeed_stage_3", "single"),
        "what does not compute waits in main memory, which is larger than a card's",
        recompute=True,
    ),
}


def place(name: str, recompute: bool = False) -> int | None:
    """Position in ORDER; None: not in it."""
    return next((at for at, way in enumerate(ORDER) if (way.name, way.recompute) == (name, recompute)), None)


def less_than(name: str, recompute: bool = False) -> tuple[TrainingWay, ...]:
    """Ways that need less memory, the fastest first; for a name that is not in ORDER, all that save any."""
    at = place(name, recompute)
    after = ORDER[2:] if at is None else ORDER[at + 1 :]
    return tuple(way for way in after if (way.name, way.recompute) != (name, recompute) and way.name != "single")
