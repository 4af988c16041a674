"""The table of options: everything a `%%distributed` line may say, apart from a strategy's own flags.

Parsing, completion, the manual and the list of names in an error are all read from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from nbtrain.base.specs import PRECISIONS
from nbtrain.machine import registry
from nbtrain.notebook.magics.line import values
from nbtrain.notebook.magics.line.values import DeviceSpec, Reader


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    """its name in the code, from which the flag is made"""
    metavar: str | None = None
    """its value in the manual. None: it is a switch, or has choices"""
    read: Reader | None = None
    """None: a switch"""
    default: Any = False
    _: KW_ONLY
    help: str
    short: str | None = None
    choices: tuple[str, ...] = ()
    """values that completion offers; without a metavar, all that there are"""
    pool: bool = False
    """it decides which processes run: `%distributed start` takes it"""
    trial: bool = False
    """it makes the run a trial: nothing comes home"""
    lasts: bool = True
    """`%distributed --option` may make it a default, unless it makes a trial"""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def usual(self) -> str:
        """Its default, as it is typed; `off` where that is nothing."""
        value = self.default.value if isinstance(self.default, DeviceSpec) else self.default
        return f"{value:g}" if isinstance(value, float) and value else str(value or "off")

    @property
    def spellings(self) -> str:
        """`-d, --devices`"""
        return f"{self.short}, {self.flag}" if self.short else self.flag

    @property
    def usage(self) -> str:
        """`-d, --devices SPEC`"""
        return " ".join(filter(None, [self.spellings, self.metavar or "|".join(self.choices)]))


def _choice(name: str, *choices: str, help: str, default: str | None = None, pool: bool = False,
            abbreviations: Mapping[str, str] | None = None,
            elsewhere: Mapping[str, str] | None = None) -> Option:  # fmt: skip
    """One of a few words, the first of which is the default unless another is named."""
    read = values.one_of(*choices, abbreviations=abbreviations, elsewhere=elsewhere)
    return Option(name, None, read, choices[0] if default is None else default, help=help, choices=choices, pool=pool)


OPTIONS: tuple[Option, ...] = (
    Option("strategy", "NAME", values.strategy, "auto", short="-s",
           help="how the ranks train one model: a strategy or preset of `%distributed strategies`, or a name of the "
           "notebook that holds an nbtrain.Strategy. auto: one device → single, several → ddp, or where weights, "
           "gradients and optimizer state do not fit under it, the first strategy under which they do. none: ranks "
           "and a process group, nothing touched, for code that brings its own (accelerate, Lightning)"),
    Option("devices", "SPEC", values.devices, DeviceSpec("auto"), short="-d", choices=("auto",), pool=True,
           help='4: the first four GPUs (on a machine without any, four CPU ranks). "0,2" or [0, 2]: those. -1: all. '
           "0: the CPU. free:2: two that nobody is using. auto: all that nobody is using"),
    _choice("accelerator", "auto", "cpu", "gpu", "cuda", "tpu", pool=True, help="what --devices counts"),
    _choice("engine", *registry.ENGINES, pool=True,
            help="local: processes on this machine. inprocess: one rank inside the kernel, where ipdb and "
            "a front end's debugger work. On other machines, elastic: those that have joined by themselves "
            "(%distributed join); ssh: those of --hosts; slurm: nodes of this allocation, or of a job that is queued "
            "for the notebook; ray: those of a Ray cluster"),
    Option("nodes", "N|MIN:MAX", values.nodes, 1, pool=True,
           help="machines, each with the ranks of --devices. 1:3: those that are there, and a run goes on when one is "
           "lost or joins, if its loops are resumable. With --engine local all ranks are on this machine, in N "
           "groups of equal size, to try code for several nodes"),
    Option("hosts", "A,B", values.hosts, (), pool=True,
           help="for --engine ssh: names of the machines, as ssh knows them"),
    Option("python", "PATH", values.program, "", pool=True,
           help="for --engine ssh and slurm: the Python there; else the notebook's own path, and python3 where that "
           "leads to none"),
    Option("sbatch", '"OPTIONS"', values.text, "", pool=True,
           help="for --engine slurm: what the job asks for besides --nodes and --devices, as sbatch takes it: "
           '"--partition gpu --account x --time 2:00:00". Inside an allocation it asks for a job of its own'),
    _choice("start", "warm", "spawn", "fork", pool=True,
            help="how ranks start. warm: forks of a process that has imported torch. spawn: a fresh interpreter "
            "each. fork: forks of the kernel, for one cell"),
    _choice("precision", *PRECISIONS, abbreviations={"16": "16-mixed", "bf16": "bf16-mixed"},
            elsewhere={"fp32": "32", "float32": "32", "no": "32", "fp16": "16-mixed", "float16": "16-mixed",
                       "half": "16-mixed", "amp": "16-mixed", "bfloat16": "bf16-mixed"},
            help="what models compute in. bf16-mixed, 16-mixed (or bf16, 16): 16 bits where that is safe, "
            "weights stay in 32; 16-mixed scales the loss for you. bf16-true, 16-true: the ranks' weights and "
            "optimizer states are in 16 bits, the notebook's stay as they are; 16-true overflows easily, as nothing is "
            "scaled"),
    Option("accumulate", "K", values.count, 1,
           help="an optimizer step at every K-th call; in between, step and zero_grad do nothing and nothing is sent"),
    Option("split_batches", help="a loader's batch is divided among the ranks; else every rank gets its own"),
    Option("no_sampler", help="every rank sees all batches"),
    Option("share_eval",
           help="loaders that are iterated to evaluate are shared out as well, which is faster; else every rank sees "
           "all of their batches, so that `correct / len(dataset)` is what one process says"),
    _choice("scale_lr", "linear", "sqrt", default="",
            help="optimizers step with their learning rate times the batches of one process that a step takes (ranks × "
            "K of --accumulate), or times its square root; groups and schedules keep your own number"),
    Option("checkpoint_activations", "NAMES", values.classes, (),
           help="Block,Head: what modules of these classes compute is not kept for the backward but computed again "
           "there, which takes less memory and more time"),
    Option("save_every", "K|10m", values.interval, None,
           help="a checkpoint every K steps, or every so many minutes (45s, 10m, 1h30m), while the training goes on"),
    Option("save_to", "DIR", values.folder, "checkpoints",
           help="the folder for them, step-000120 and so on; load(DIR) takes the newest"),
    Option("keep_last", "N", values.count, 3, help="how many of them are kept"),
    Option("keep", "NAMES", values.names, (),
           help="a,b: what these names hold stays on the ranks. The notebook's own object is left as it is; for a new "
           "one it gets a handle, whose .pull() brings a copy home"),
    Option("background",
           help="the cell returns at once with a run (_, or nbtrain.background()) that has wait(), stop() and metrics; "
           "the notebook stays usable, and a cell that reads the model gets the last finished step's weights"),
    Option("detach", trial=True,
           help="the run goes on without this notebook: the kernel may restart, crash or be shut down, the server too. "
           "%distributed runs lists such runs, %distributed attach shows one and brings home what it has done"),
    Option("until", "11h45m|22:30", values.moment, None, trial=True,
           help="as --detach, and the run is stopped after a whole step when so much time has passed, or at that time "
           "of the day: before a session of Colab or a job of SLURM ends. %distributed resume goes on from there"),
    Option("hang_after", "S", values.seconds, 60.0,
           help="seconds that a rank may wait for another one before it is shown where all of them are; nothing is "
           "ended"),
    Option("profile", "K", values.count, 0, lasts=False,
           help="torch's profiler over K steps of every rank, from the second one on: one trace of all ranks in "
           "nbtrain-output/, for ui.perfetto.dev, and below the cell the operators that take longest and how long each "
           "rank has waited"),
    Option("detect_anomaly", lasts=False,
           help="an error in the first backward that computes NaN, and the line of the forward that it belongs to, as "
           "torch.autograd.set_detect_anomaly(True) has it; steps take several times as long"),
    Option("debug_ranks", "RANKS", values.debug_ranks, "first", choices=("first", "all"),
           help="ranks that ask at breakpoint(). first: of those that reach it together one, the others go on; a rank "
           "that alone reaches one (`if rank == 1: breakpoint()`) asks as well. all: one after another. 0,2: these"),
    Option("oversubscribe", pool=True, help="several ranks per GPU, to try multi-rank code on one card"),
    _choice("output", "rank0", "all", "files",
            help="whose printed lines are shown. rank0: rank 0's, and what others printed differently, folded in "
            "below. all: every line with its rank. files: rank 0's; the others' go into nbtrain-output/"),
    _choice("monitor", "auto", *registry.VIEWS, help="the dashboard below the cell"),
    Option("log_to", "NAME", values.writer, "",
           help="what log() says is also handed to this: a SummaryWriter of TensorBoard, or anything else of the "
           "notebook with add_scalar(tag, value, step)"),
    Option("compare", "A,B,…", values.strategies, (), trial=True,
           help="the cell's loop for a few steps under each of these strategies and presets (all: every one that is "
           "available); the notebook stays as it is, and a table says memory, speed and which is best"),
    Option("verify", trial=True,
           help="the cell's first steps under its strategy and as one process on the same samples: what differs, and "
           "the likely cause; the notebook stays as it is. %distributed verify does it with the cell that was run "
           "last"),
    Option("steps", "K", values.count, 10,
           help="so many steps of the loop are timed, after two that are not; for --compare, --find-batch, "
           "--find-model and --grow; --verify plays so many"),
    Option("find_batch", trial=True,
           help="the largest batch that fits, found by trying: with --compare under each strategy"),
    Option("find_model", "NAME=1,2,4,8", values.sizes, None, trial=True,
           help="the largest of these values for a name of the notebook with which the cell's model fits; the cell "
           "makes the model, and reads the name"),
    Option("grow", "1,2,4,8", values.counts, (), trial=True,
           help="the cell's loop on so many ranks, one after another, and what that says of 8, 64 and 512"),
    Option("memory", "SIZE", values.memory, 0,
           help="2GB: memory that a rank may use in a trial or a plan, in place of all that the device has"),
    Option("bandwidth", "SPEED", values.bandwidth, 0.0,
           help="between nodes, for --grow and %distributed plan: 25GB/s, or 200Gbit/s"),
    Option("locals", lasts=False,
           help="for %distributed where: what the locals of the innermost calls hold on each rank, in short"),
    Option("batch", "NAME", values.name, "", lasts=False,
           help="for %distributed plan and pick: what the model is called with: the notebook's name of a batch, x,y "
           "for several, or the loader that gives them"),
)  # fmt: skip

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
BY_FLAG: Mapping[str, Option] = {
    flag: option for option in OPTIONS for flag in (option.flag, option.short) if flag is not None
}
