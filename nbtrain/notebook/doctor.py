"""What is possible here, what is not, and why: `%distributed doctor` and `python -m nbtrain doctor`.

Nothing is imported to find out, torch least of all: versions come from package metadata, cards from
the driver, limits from the cgroup.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import nbtrain.machine.devices as devices
import nbtrain.machine.fork_safety as fork_safety
import nbtrain.machine.gpus as gpus
import nbtrain.machine.host as host
import nbtrain.machine.registry as registry
from nbtrain.base.humanize import size
from nbtrain.compat import strategy_packages
from nbtrain.compat import tested_versions as tried
from nbtrain.notebook import annexes

GIB = 2**30

PACKAGES: Mapping[str, str] = {
    "torch": "2.8",
    "numpy": "1.26",
    "ipython": "7.34",
    "ipykernel": "6.17",
    "ipywidgets": "7.7",
    "anywidget": "0.9",
    "cloudpickle": "3.0",
    "psutil": "5.9",
}
"""What nbtrain cannot do without, and from which version."""

PLACES: Mapping[str, str] = {
    "Colab": "nbtrain is tested with these versions, elsewhere; leave ipython and ipykernel at theirs: Colab needs it",
    "Kaggle": "nbtrain is tested with these versions, elsewhere; if no table of ranks shows, write --monitor text",
    "Databricks": "nbtrain was not tried here; if no table of ranks shows, write --monitor text",
    "Python": "no notebook is running in this process: what is said about the kernel is about this process",
}


@dataclass(frozen=True, slots=True)
class ReportLine:
    """One line of the report."""

    level: str
    """`ok`, `note` (a limit worth knowing), `warn` (something will not work) or `bad` (nbtrain cannot work)"""
    topic: str
    text: str
    instead: str = ""
    """what to write or do about it"""


# ---------------------------------------------------------------- the findings


def diagnose(
    *,
    machine: devices.Machine | None = None,
    versions: Mapping[str, str | None] | None = None,
    root: Path = Path("/"),
) -> list[ReportLine]:
    """Everything there is to say. What is not given is read from this process and its machine."""
    machine = machine or devices.here()
    versions = _versions() if versions is None else versions
    return [
        *_place(),
        *check_versions(versions),
        *check_host(machine.cores, host.memory(root), host.shared_memory(root / "dev/shm")),
        *check_gpus(machine, gpus.nvml_problem() if not machine.gpus else None),
        *check_cuda(fork_safety.cuda_initialised()),
        *check_starts(fork_safety.why_not_fork()),
        *check_strategies(machine),
        *(ReportLine("note", "detached", line) for line in annexes.ask("runs that go on") or ()),
    ]


def report(findings: Iterable[ReportLine] | None = None) -> str:
    """The findings as plain text, one line each, with what to do below."""
    report_lines = diagnose() if findings is None else list(findings)
    width = max((len(line.topic) for line in report_lines), default=0)
    marks = {"ok": " ", "note": "·", "warn": "!", "bad": "✗"}
    lines = []
    for line in report_lines:
        lines.append(f"{marks[line.level]} {line.topic:<{width}}  {line.text}")
        if line.instead:
            lines.append(f"  {'':<{width}}  → {line.instead}")
    counts = {level: sum(line.level == level for line in report_lines) for level in marks}
    if counts["bad"] or counts["warn"]:
        lines.append(
            f"\n{counts['bad']} × ✗ (nbtrain cannot work like this), {counts['warn']} × ! (will not work here)"
        )
    else:
        lines.append("\nnothing stands in the way")
    return "\n".join(lines)


def _place() -> Iterator[ReportLine]:
    place = host.environment_of(os.environ, sys.modules)
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield ReportLine("ok", "here", f"{place}, {system}")
    if place in PLACES:
        yield ReportLine("note", "here", PLACES[place])


def check_versions(versions: Mapping[str, str | None]) -> Iterator[ReportLine]:
    """`versions`: package → version, None where it is not installed."""
    good = []
    for name, version in versions.items():
        least = PACKAGES.get(name)
        if version is None and least is not None:
            yield ReportLine("bad", "versions", f"{name} is not installed", f'pip install "{name}>={least}"')
        elif version is None:
            yield ReportLine("note", "versions", f"{name} runs from its source folder, it is not installed")
        elif name == "ipykernel" and tried.release(version)[:2] == (7, 0):
            yield ReportLine(
                "warn",
                "versions",
                f"ipykernel {version} loses what threads print and show: a run's output may stand still",
                'pip install "ipykernel>=6.17,!=7.0.*" and restart the kernel',
            )
        elif least is not None and tried.release(version) < tried.release(least):
            yield ReportLine(
                "bad",
                "versions",
                f"{name} {version} is older than {least}, the oldest that nbtrain supports",
                f'pip install "{name}>={least}" and restart the kernel',
            )
        elif tried.newest(name) and tried.release(version) > tried.release(tried.newest(name)):
            newest = tried.newest(name)
            yield ReportLine(
                "note",
                "versions",
                f"{name} {version} is newer than {newest}, the newest that nbtrain was run with; a strategy that does "
                "not fit it will say so",
                f'if something fails: pip install "{name}=={newest}" and restart the kernel',
            )
        elif tried.oldest(name) and tried.release(version) < tried.release(tried.oldest(name)):
            yield ReportLine(
                "warn",
                "versions",
                f"{name} {version} is older than {tried.oldest(name)}, the oldest that nbtrain was run with",
                f'pip install "{name}>={tried.oldest(name)}" and restart the kernel',
            )
        else:
            good.append(f"{name} {version}")
    if good:
        yield ReportLine("ok", "versions", ", ".join(good))


def check_host(cores: int, memory: host.HostMemory, shm: host.Space | None) -> Iterator[ReportLine]:
    machine = os.cpu_count() or cores
    yield ReportLine("ok", "cores", f"{cores} allowed" + (f" of the machine's {machine}" if machine > cores else ""))
    limit = f", the cgroup allows {size(memory.limit)} of them" if memory.limit < memory.host else ""
    text = f"{size(memory.available)} free; the machine has {size(memory.host)}{limit}"
    if memory.available < 2 * GIB:
        yield ReportLine("note", "memory", text, "a warm rank needs some 0.2 GB besides its copy of the weights")
    else:
        yield ReportLine("ok", "memory", text)
    if shm is not None and shm.free < GIB:
        yield ReportLine(
            "note",
            "/dev/shm",
            f"{size(shm.free)} free: enough for nbtrain, which does not use it; DataLoader workers hand their batches "
            "over in it and die with a bus error when it is full",
            "num_workers=0, or a container started with --shm-size=2g",
        )
    elif shm is not None:
        yield ReportLine("ok", "/dev/shm", f"{size(shm.free)} free")


def check_gpus(machine: devices.Machine, problem: str | None) -> Iterator[ReportLine]:
    """`problem`: why the driver shows no cards."""
    if not machine.gpus:
        text = "no NVIDIA GPU; an integer for --devices is a number of CPU ranks"
        if problem and problem.startswith("NVML:"):  # there is a driver, and it does not work
            yield ReportLine(
                "warn", "GPUs", f"the driver does not answer: {problem}", "restart the machine or container"
            )
        elif (Path("/dev") / "kfd").exists():
            yield ReportLine(
                "note", "GPUs", "AMD cards are here, and are not counted in this version: ranks run on CPU"
            )
        else:
            yield ReportLine("ok", "GPUs", text)
        return
    cards = machine.cards()
    for number, card in enumerate(cards):
        users = [f"process {user.pid}{' (this notebook)' * (user.pid in machine.mine)}" for user in card.users]
        who = f"used by {', '.join(users)}" if users else "no process is seen on it"
        yield ReportLine(
            "ok", "GPUs", f"cuda:{number} {card.name}, {size(card.used)} of {size(card.total)} used, {who}"
        )
    if machine.visible is not None and len(cards) < len(machine.gpus):
        text = f"CUDA_VISIBLE_DEVICES={machine.visible!r} shows {len(cards)} of {len(machine.gpus)} GPUs"
        yield ReportLine("note", "GPUs", text, "" if cards else "unset it before the kernel starts")
    if len({card.name for card in machine.gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield ReportLine(
            "note",
            "GPUs",
            "the cards differ: torch counts the fastest first, nbtrain counts as nvidia-smi does, so that cuda:0 may "
            "be another card for each",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID before the kernel starts",
        )


def check_cuda(initialised: str | None) -> Iterator[ReportLine]:
    if initialised is None:
        yield ReportLine("ok", "CUDA", "not initialised in this process")
        return
    yield ReportLine(
        "note",
        "CUDA",
        f"initialised in this process by {initialised}: it holds some of a GPU's memory, and cannot be forked",
        "warm ranks do not mind; to give the memory back, restart the kernel and keep the model on the CPU",
    )


def check_starts(why_not_fork: str | None, system: str = sys.platform) -> Iterator[ReportLine]:
    if system == "linux":
        yield ReportLine("ok", "--start", "warm and spawn are possible" + ("" if why_not_fork else ", and so is fork"))
    else:
        text = f"spawn only: warm ranks are forks of a clean process, which is safe on Linux alone (this is {system})"
        yield ReportLine("note", "--start", text)
    if why_not_fork and system == "linux":
        yield ReportLine("note", "--start", why_not_fork)


def check_strategies(machine: devices.Machine) -> Iterator[ReportLine]:
    """Which are available; of the others, what is missing and the command that brings it."""
    kinds = {"cpu", *(["cuda"] if machine.cards() else []), *(["tpu"] if machine.tpus else [])}
    ready = []
    for name, entry in sorted(registry.strategies().items()):
        missing = [package for package in entry.needs.packages if not _installed(package)]
        if missing:
            line = registry.to_install(entry.needs, missing)
            yield ReportLine("note", "strategies", f"{name} needs {', '.join(missing)}", line)
        elif not kinds & set(entry.needs.kinds):
            yield ReportLine("note", "strategies", f"{name} needs a device of kind {' or '.join(entry.needs.kinds)}")
        elif reason := strategy_packages.refusal(name, entry.internals, entry.instead, look=False):
            why, _, instead = reason.rpartition(". ")
            yield ReportLine("warn", "strategies", why, instead)
        else:
            ready.append(f"{name} ({entry.unrun})" if entry.unrun else name)
    yield ReportLine("ok", "strategies", "available: " + ", ".join(ready))


# ---------------------------------------------------------------- readings that only the doctor needs


def _versions() -> dict[str, str | None]:
    extras = [name for name in tried.TRIED if name not in PACKAGES and _version(name) is not None]
    return {name: _version(name) for name in ("nbtrain", *PACKAGES, *extras)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
