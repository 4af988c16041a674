"""Options of a `%%distributed` line that a script does without. A test has a table of all, and none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RunSpec
from nbtrain.machine.gpus import gpus

REFUSED: Mapping[str, tuple[object, str]] = {
    "accumulate": (1, "--accumulate {0}: write (loss / {0}).backward(), and step every {0} batches"),
    "share_eval": (False, "--share-eval: leave it out, and every process evaluates all"),
    "scale_lr": ("", "--scale-lr {}: write the rate in the cell"),
    "checkpoint_activations": ((), "--checkpoint-activations: call torch.utils.checkpoint in the model"),
}
"""options that a script has no line for → (value without it, what to write)"""


def refuse(run: RunSpec) -> None:
    for name, (without, instead) in REFUSED.items():
        value = getattr(run, name)
        if value != without and value:
            raise NotSupported("export has no line for " + instead.format(value))
    if run.strategy == "fsdp" and run.options.get("cpu_offload"):
        raise NotSupported(
            "export has no line for --cpu-offload: leave it out, and hand offload_policy=CPUOffloadPolicy() to "
            "fully_shard in the script"
        )


def notes(run: RunSpec) -> Iterator[str]:
    """What the script goes without."""
    ranks, nodes = run.pool.world_size, run.pool.nodes
    if run.pool.kind == "cpu" and gpus():
        yield "the cell ran on CPUs, and a script takes GPUs where there are any: CUDA_VISIBLE_DEVICES= hides them"
    if nodes > 1:
        yield (
            f"--nodes {nodes}: on each machine torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29500, HOST being the name of one of them"
        )
    if run.pool.shares_cards:
        yield "--oversubscribe: each process of a script needs a card of its own; start as many as there are cards"
    if run.save_steps or run.save_seconds:
        yield "--save-every: a script saves after the epochs of the cell's outermost loop, not in between"
    if run.log_to:
        yield f"--log-to {run.log_to}: log() of the script prints alone; hand its numbers to {run.log_to} in the cell"
    if run.profile:
        yield f"--profile {run.profile}: write torch.profiler.profile() around the loop of the script"
    if run.output != "rank0":
        yield f"--output {run.output}: in the script rank 0 alone prints; without its `def print` all of them do"
    if run.strategy == "fsdp" and not run.options.get("limit_all_gathers", True):
        yield "--no-limit-all-gathers: fully_shard of the script gathers one unit ahead"
