"""What the user asked for, as dataclasses. Frozen, so that equality can decide whether a pool is reused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nbtrain.base.quick_pickle import quickly_pickled

PRECISIONS = ("32", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
"""What a model may compute in. `mixed`: its weights stay as they are, its operations are in 16 bits where that is safe.
`true`: its weights are in 16 bits too, on the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Identity and devices of a rank. `device` is what torch calls it: "cpu", "cuda:1"."""

    rank: int
    world_size: int
    local_rank: int
    device: str
    threads: int
    devices: tuple[str, ...] = ()
    """all devices of this rank, where it has several; `device` is the first"""
    nodes: int = 1
    """groups of equal size that the ranks form, one after another; `local_rank` counts within one"""

    @property
    def node(self) -> int:
        return self.rank * self.nodes // self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a strategy, engine or view needs; the kernel reads it without importing anything heavy."""

    min_ranks: int = 1
    max_ranks: int | None = None
    kinds: tuple[str, ...] = ("cpu", "cuda")
    packages: tuple[str, ...] = ()
    install: str = ""
    """the line that adds the packages, where `pip install` and their names is not enough"""
    together: bool = False
    """it runs as one rank with all devices"""
    notebook: bool = False
    """a terminal cannot show it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinesWanted:
    """What an engine is asked for that has nodes started on other machines."""

    nodes: int | None = None
    """machines; None: as many as it leads to"""
    most: int | None = None
    """up to so many: those that are there take part, and who comes or goes changes the run that goes on"""
    hosts: tuple[str, ...] = ()
    """their names, for an engine that takes them"""
    devices: Any = "auto"
    """on each of them, as `--devices` has it; hashable"""
    quoted: bool = True
    """false for text without quotes, where `4` is a number"""
    accelerator: str = "auto"
    python: str = ""
    """the Python there; empty: the notebook's own path, where that leads to one"""
    sbatch: str = ""
    """what a queue is asked for besides, as its command has it"""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """Which processes to have. Two cells with equal pool specs share one pool."""

    engine: str = "local"
    start: str = "warm"
    kind: str = "cpu"
    """`cpu`, `cuda` or `tpu`"""
    devices: tuple[str, ...] = ("cpu",)
    """one entry per rank, as torch calls them; with `together`, those of the only one"""
    uuids: tuple[str, ...] = ()
    """the cards that these names mean now, one per rank; empty on CPU"""
    oversubscribe: bool = False
    together: bool = False
    """one rank has all devices"""
    nodes: int = 1
    """groups of equal size that the ranks form"""
    machines: MachinesWanted | None = None
    """of an engine whose ranks are on other machines; None: they are on this one"""
    early: bool = field(default=False, compare=False)
    """they need not have imported what only training needs"""

    @property
    def world_size(self) -> int:
        return 1 if self.together else len(self.devices)

    @property
    def where(self) -> str:
        """`cpu`, `cuda:0, cuda:1`; of one rank that has them all `cpu × 2`."""
        counts = {device: self.devices.count(device) for device in self.devices}
        return ", ".join(f"{name} × {n}" if self.together and n > 1 else name for name, n in counts.items())

    @property
    def backend(self) -> str:
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def shares_cards(self) -> bool:
        """Whether some ranks are on one card. Slices of one have names of their own."""
        known = len(set(self.uuids)) < len(self.uuids) or any(uuid.startswith("MIG-") for uuid in self.uuids)
        return self.kind == "cuda" and self.world_size > 1 and known


def difference(old: PoolSpec, new: PoolSpec) -> str:
    """How two pools differ, in the words of the options."""
    if old.devices != new.devices:
        return f"--devices: {len(old.devices)} × {old.kind} → {len(new.devices)} × {new.kind}"
    if old.together != new.together:
        return "one rank with all devices → a rank for each" if old.together else "a rank for each device → one rank"
    if old.uuids != new.uuids:
        return "CUDA_VISIBLE_DEVICES: the same numbers are other cards now"
    for name in ("engine", "start", "oversubscribe", "nodes"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            return f"--{name}: {before} → {after}"
    for name in ("nodes", "most", "hosts", "python", "sbatch"):
        before, after = (getattr(spec.machines, name, "") for spec in (old, new))
        if before != after:
            return f"--{'nodes' if name == 'most' else name}: other machines are wanted"
    return "other options"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Run a cell for a few steps to measure it. Nothing comes home."""

    steps: int
    """steps that are timed"""
    warm: int = 2
    """steps before those"""
    memory: int = 0
    """bytes that a rank may take besides what it has; 0: no limit"""
    batch: float = 1.0
    """factor for the samples in a loader's batch"""
    names: Mapping[str, Any] = field(default_factory=dict)
    """name of the notebook → its value during the trial"""
    threads: int = 0
    """threads of a rank, on a CPU; 0: the default"""
    record: Record | None = None
    """what to record of the steps, to compare it with another trial"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a trial records of its steps: samples, losses, weights."""

    folder: str
    numbers: tuple[str, ...] = ()
    """names that may hold a number at the end of the cell"""
    stands_for: int = 0
    """ranks that one process stands for: its loaders give what theirs would give together"""
    turned: bool = False
    """the samples of each batch come in the opposite order"""
    without: tuple[str, ...] = ()
    """what is switched off: `dropout`, `batch norm`"""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """How one cell is to be run."""

    pool: PoolSpec
    strategy: str = "single"
    chosen: bool = False
    """by `--strategy auto`"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """the strategy's own options"""
    precision: str = "32"
    """one of PRECISIONS"""
    accumulate: int = 1
    split_batches: bool = False
    sampler: bool = True
    """False: every rank sees all batches (`--no-sampler`)"""
    share_eval: bool = False
    """loaders that are iterated for evaluation are shared out, too"""
    scale_lr: str = ""
    """`linear`, `sqrt`: optimizers step with a learning rate for the batch of all ranks"""
    checkpoint_activations: tuple[str, ...] = ()
    """names of classes whose activations are recomputed in the backward"""
    ranks: tuple[int, ...] | None = None
    """None: all of them"""
    save_steps: int | None = None
    """steps between two checkpoints"""
    save_seconds: float | None = None
    """or seconds between them"""
    save_to: str = "checkpoints"
    """the folder for checkpoints"""
    keep_last: int = 3
    resume: tuple[str, bytes] | None = None
    """where the cell's loops go on after a checkpoint was loaded in the notebook, pickled, and an id of that load"""
    notes_place: bool = False
    """where its loops are is known after each step: one that is stopped can be gone on from"""
    background: bool = False
    weights_folder: str = ""
    """the folder in which a run in the background puts its weights when the notebook reads them"""
    keep: tuple[str, ...] = ()
    """names whose objects stay on the ranks"""
    hang_after: float = 60.0
    """seconds that a rank may wait for another before the user is told"""
    profile: int = 0
    """steps that torch's profiler records"""
    detect_anomaly: bool = False
    """a backward that computes NaN is an error, as torch's detect_anomaly has it"""
    debug_ranks: str | tuple[int, ...] = "first"
    """ranks that talk at a breakpoint: `first` of those that reach it together, `all`, or these"""
    output: str = "rank0"
    monitor: str = "auto"
    log_to: str = ""
    """the notebook's name of the writer that metrics are passed to; the object itself stays in the kernel"""
    trial: Trial | None = None
    batches: int = 0
    """batches of one process that a step takes; 0: as many as the strategy's ranks share out"""

    @property
    def elastic(self) -> bool:
        """Machines may come and go while it runs."""
        return self.pool.machines is not None and self.pool.machines.most is not None


APART = frozenset((
    "pool", "strategy", "options", "precision", "resume", "ranks", "chosen", "weights_folder", "batches", "trial",
    "notes_place",
))  # fmt: skip
"""fields of a RunSpec that the user did not ask for, or that are said by themselves"""


def asked(run: RunSpec) -> dict[str, Any]:
    """What the user asked for besides, by the names of its options: to be typed again."""
    default = RunSpec(pool=run.pool)
    values = {one.name: getattr(run, one.name) for one in fields(run) if one.name not in APART}
    said = {name: value for name, value in values.items() if value != getattr(default, name)}
    steps, seconds = said.pop("save_steps", 0), said.pop("save_seconds", 0.0)
    return {**said, "save_every": steps or f"{seconds:g}s"} if steps or seconds else said
