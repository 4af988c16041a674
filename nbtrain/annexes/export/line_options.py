"""What becomes of each option of a `%%distributed` line in a script: none is dropped without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nbtrain.errors import NotSupported
from nbtrain.machine.gpus import gpus
from nbtrain.specs import RunSpec

WRITTEN = frozenset(
    {"strategy", "devices", "precision", "accumulate", "split_batches", "no_sampler", "detect_anomaly", "keep",
     "background"}
)  # fmt: skip
"""options that a script does. Of `keep` and `background`: it is not compared with weights that are not at home"""
REFUSED: Mapping[str, tuple[object, str]] = {
    "share_eval": (False, "--share-eval: leave it out, and every process evaluates all"),
    "scale_lr": ("", "--scale-lr {}: write the rate in the cell"),
    "checkpoint_activations": ((), "--checkpoint-activations: call torch.utils.checkpoint in the model"),
}
"""options that a script has no line for → (value without it, what to write)"""
SAID = frozenset({"accelerator", "nodes", "oversubscribe", "save_every", "log_to", "profile", "output"})
"""options that a script goes without, which `notes` says"""
NOTHING: Mapping[str, str] = {
    "engine": "torchrun starts the processes",
    "hosts": "torchrun is started on each machine; the note on --nodes says how",
    "python": "that of the script is the one it is started with",
    "sbatch": "--slurm of export writes a file, which has these lines",
    "start": "torchrun starts fresh interpreters",
    "save_to": "where --save-every saves, which is said",
    "keep_last": "what --save-every keeps, which is said",
    "hang_after": "it only shows where ranks wait",
    "debug_ranks": "it is about a notebook's prompt",
    "monitor": "there is no cell to show it below",
    **dict.fromkeys(
        ("compare", "verify", "steps", "find_batch", "find_model", "grow", "memory", "bandwidth"),
        "a trial measures a cell; the script is the cell itself",
    ),
    **dict.fromkeys(("locals", "batch"), "it belongs to another verb"),
}
"""options that do not change what is trained → why"""

OF_STRATEGY: Mapping[str, Mapping[str, str]] = {
    "single": {},
    "ddp": {"bucket_mb": "written", "comm_dtype": "written"},
    "zero1": {"bucket_mb": "written", "comm_dtype": "written"},
    "fsdp": {
        "sharding": "written", "replicas": "written", "wrap": "written", "comm_dtype": "written",
        "cpu_offload": "refused", "limit_all_gathers": "said",
    },
}  # fmt: skip
"""a strategy's own options → what becomes of them. Those of deepspeed are in the config, which is written"""


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
