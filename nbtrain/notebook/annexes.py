"""What a cell can do without, as data: the annexes' verbs, options, Python names, and what else asks for them.

Nothing else in the core names an annex, and it imports none: `load` does, when one is used. Where an annex has been
left out of an installation, whoever asks for it is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any

from nbtrain.base.errors import NotSupported
from nbtrain.base.when_imported import when_imported
from nbtrain.machine.registry import left_out
from nbtrain.notebook.verb import Verb

ANNEXES = "nbtrain.annexes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Annex:
    """One folder of `nbtrain/annexes`. What it offers is written `module:name`, with the module's place below it."""

    page: str
    """of the documentation"""
    verbs: Mapping[str, Verb] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    """option of `%%distributed` with which a cell is tried and not run → what tries it: `(state, line, base, cell)`"""
    names: Mapping[str, str] = field(default_factory=dict)
    """name of `nbtrain` → what it is"""
    asked: Mapping[str, str] = field(default_factory=dict)
    """what the core would like to know, where the annex is there"""
    imported: Mapping[str, str] = field(default_factory=dict)
    """another package's module → what is called with its name once the notebook has imported it"""


TABLE: Mapping[str, Annex] = {
    "planning": Annex(
        page="choosing.md",
        verbs={
            "plan": Verb("plan [MODEL] [options]", "plan_verb:show",
                         "what the model would need under each strategy, in memory and in communication, whether that "
                         "fits here, and which one to take; nothing is started", options=True,
                         takes=("batch", "precision", "accumulate", "bandwidth", "memory"), names=True),
            "pick": Verb("pick [MODEL] [options]", "picker.picker:pick",
                         "choose on a form: strategy, its options and devices, with the memory that each needs; "
                         "measure some of them, and write the line into the next cell", options=True,
                         takes=("batch", "precision", "strategy", "accumulate", "memory"), names=True),
            "verify": Verb("verify [CELL] [--steps K]", "trials.verify_verb:verify",
                           "whether a %%distributed cell (the last one, or In[CELL]) gives what one process gives: its "
                           "first steps are played both ways on the same samples; what differs, and the likely cause. "
                           "The notebook stays as it is", takes=("steps",), names=True),
        },
        options={
            **dict.fromkeys(("compare", "find_batch", "find_model"), "trials.trial_options:run"),
            "verify": "trials.verify_verb:above_a_cell",
            "grow": "trials.grow_option:grow",
        },
        names={"plan": "plan_verb:for_programs", "picker": "picker.picker:picker"},
        asked={"auto": "auto_strategy:advise", "out of memory": "oom_advice:instead"},
    ),
    "detached": Annex(
        page="detached.md",
        verbs={
            "runs": Verb("runs [stop|where|kill RUN] [--drop RUN]", "runs_verb:runs",
                         "the runs that go on without their notebook, or have ended and wait to be taken home; ends "
                         "one, says where its ranks are, drops what it has left", names=True, own=True),
            "resume": Verb("resume [RUN] [options]", "resume_verb:resume",
                           "goes on in a new run where a detached one was stopped, or from the newest checkpoint of "
                           "one that is lost or has failed, with the options that are given now",
                           names=True, options=True, takes=("strategy", "until"), own=True),
            "attach": Verb("attach [RUN] [--now]", "attach_verb:attach",
                           "shows such a run (the last one, or RUN), with what it has printed, and brings home what it "
                           "has done as soon as it has ended; --now: at once the weights of its newest whole step, and "
                           "it goes on", names=True, own=True),
        },
        options=dict.fromkeys(("detach", "until"), "start:start"),
        names={"detached": "detached_run:detached"},
        asked={"runs that go on": "runs_table:going_on"},
    ),
    "export": Annex(
        page="export.md",
        verbs={
            "export": Verb("export FILE [--cell N] [--resume] [--notebook] [--slurm] [--force]", "export_verb:export",
                           "writes the last %%distributed cell, or In[N], with the cells before it, as a script that "
                           "torchrun runs without nbtrain; with a checkpoint after each epoch; as a notebook; with a "
                           "file for sbatch", names=True, own=True),
        },
    ),
    "machines": Annex(
        page="clusters.md",
        asked={"join --slurm": "queue_files:slurm", "join --kubernetes": "queue_files:kubernetes"},
    ),
    "frameworks": Annex(
        page="functions.md",
        names={
            "run": "functions.run:run",
            "predict": "functions.predict:predict",
            "notebook_launcher": "functions.launchers:notebook_launcher",
            "TorchDistributor": "functions.launchers:TorchDistributor",
            "lightning": "lightning",
            **dict.fromkeys(("DataModule", "Module", "Trainer"), "no_trainer"),  # it raises: they are Lightning's
        },
        imported={
            "lightning.pytorch.strategies": "lightning:register",
            "pytorch_lightning.strategies": "lightning:register",
        },
    ),
}  # fmt: skip


def load(what: str, annex: str, where: str) -> Any:
    """The function, class or module at this place of an annex. `what`: as the user knows it."""
    if reason := left_out(what, f"{ANNEXES}.{annex}"):
        raise NotSupported(reason)
    return resolve_name(f"{ANNEXES}.{annex}.{where}")


def ask(question: str, *arguments: Any, **named: Any) -> Any:
    """What the annex that knows says; None where there is none."""
    for annex, row in TABLE.items():
        if question in row.asked and not left_out(question, f"{ANNEXES}.{annex}"):
            return load(question, annex, row.asked[question])(*arguments, **named)
    return None


def watch_imports() -> Callable[[], None]:
    """Tell annexes when the notebook imports what they extend, or now if it has. What is returned ends the watch."""
    ends = [
        when_imported(module, partial(_imported, annex, where, module))
        for annex, row in TABLE.items()
        if row.imported and not left_out(annex, f"{ANNEXES}.{annex}")
        for module, where in row.imported.items()
    ]

    def end_all() -> None:
        for end in ends:
            end()

    return end_all


def _imported(annex: str, where: str, module: str) -> None:
    load(module, annex, where)(module)


def need(question: str, *arguments: Any) -> Any:
    """What the annex that knows does for it; an error that names the annex where it was left out."""
    return load(question, *_place("asked", question))(*arguments)


def verb(name: str) -> Any:
    """What runs this verb of `%distributed`."""
    annex, row = _place("verbs", name)
    return load(name, annex, str(row.do))


def trial(option: str) -> Any:
    """What tries a cell for this option of `%%distributed`."""
    return load(f"--{option.replace('_', '-')}", *_place("options", option))


def named(name: str) -> Any:
    """`nbtrain.predict` and the like."""
    return load(f"nbtrain.{name}", *_place("names", name))


def _place(table: str, name: str) -> tuple[str, Any]:
    """The annex that has this name in one of its tables, and what stands there."""
    return next((annex, getattr(row, table)[name]) for annex, row in TABLE.items() if name in getattr(row, table))
