"""Resolves `--devices` to one device per rank, from the cards and cores that are there.

An int counts, a string lists indices (`3` is the first three GPUs, `"3"` is GPU 3). Indices count
within CUDA_VISIBLE_DEVICES, as torch counts. `auto` and `free:2` take cards that nobody else is using
and lease them, so that two notebooks of one user do not both take them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import nbtrain.base.humanize as humanize
import nbtrain.machine.fork_safety as fork_safety
import nbtrain.machine.gpus as gpus
import nbtrain.machine.host as host
from nbtrain.base.errors import DeviceError
from nbtrain.machine.gpus import Gpu

if TYPE_CHECKING:
    from nbtrain.machine.leases import Lease

Spec = int | str | Sequence[int] | None

VALID = (
    "valid are: 0 or None (CPU), 3 (the first 3 GPUs; without GPUs, 3 CPU ranks), -1 (all GPUs), "
    '"3" in quotes (GPU 3), "1, 3" or [1, 3] (GPUs 1 and 3), auto, free:2 (2 GPUs that nobody is using)'
)
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "tpu")

UNEXPLAINED = 2**30
"""Bytes of a card that no visible process accounts for, above which somebody outside the container must be using
it; a desktop's windows stay below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices to choose from."""

    cores: int
    gpus: tuple[Gpu, ...] = ()
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, as the user or SLURM set it; None: not set"""
    mine: frozenset[int] = frozenset()
    """this process and its children: what they use is not used by others"""
    cuda_here: bool = False
    """this process computes on a card itself, so that memory without an owner may be its own"""
    tpus: int = 0
    """chips; with PJRT_DEVICE=CPU, cores that stand for them"""
    leases: Path | None = None
    """where leases are kept; None: the user's own directory"""

    def cards(self) -> tuple[Gpu, ...]:
        """The cards as torch counts them: card i is `cuda:i`."""
        if self.visible is None:
            return self.gpus
        cards: list[Gpu] = []
        for entry in (part.strip() for part in self.visible.split(",")):
            card = self._card(entry)
            if card is None:  # CUDA stops at the first entry that it does not know
                break
            if card in cards:  # and shows nothing at all when one comes twice
                return ()
            cards.append(card)
        return tuple(cards)

    def _card(self, entry: str) -> Gpu | None:
        if entry.isdecimal():
            return next((gpu for gpu in self.gpus if gpu.index == int(entry)), None)
        if entry.startswith("MIG-"):  # a slice of a card; the driver's list of cards does not have it
            return Gpu(index=-1, uuid=entry, name="MIG slice")
        matches = [gpu for gpu in self.gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """The devices of the ranks, one name for each. Equal when the ranks would be on the same devices."""

    kind: str
    """`cpu`, `cuda` or `tpu`"""
    names: tuple[str, ...]
    """as torch calls them within CUDA_VISIBLE_DEVICES"""
    uuids: tuple[str, ...] = ()
    """the cards, one per rank; empty on CPU. Of TPUs, which chip, if one was named"""
    lease: Lease | None = field(default=None, compare=False)
    """keep it as long as the ranks live, close it when they are gone"""

    def __str__(self) -> str:
        """`cuda:0-3`, `cuda:1,3`, `cpu`: for the first line of a run."""
        if self.kind != "cuda":
            return self.kind
        runs: list[list[int]] = []
        for index in sorted({int(name.partition(":")[2]) for name in self.names}):
            if runs and index == runs[-1][1] + 1:
                runs[-1][1] = index
            else:
                runs.append([index, index])
        return "cuda:" + ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


@dataclass(frozen=True, slots=True)
class _Request:
    """What `--devices` asks for. `what`: cpu, count, all, list, auto or free."""

    what: str
    typed: str
    count: int = 0
    indices: tuple[int, ...] = ()


def here() -> Machine:
    """The machine that this process runs on."""
    children = psutil.Process().children(recursive=True)
    return Machine(
        cores=host.cores_allowed(),
        gpus=gpus.gpus(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        mine=frozenset([os.getpid(), *(child.pid for child in children)]),
        cuda_here=fork_safety.cuda_initialised() is not None,
        tpus=gpus.tpus(),
    )


def resolve(
    spec: Spec,
    *,
    accelerator: str = "auto",
    oversubscribe: bool = False,
    quoted: bool = True,
    machine: Machine | None = None,
) -> Devices:
    """One device name per rank, or a DeviceError of one line.

    `quoted=False` says that a string comes from the magic line without quotes, where `4` is an int.
    """
    request = _parse(spec, quoted)
    if accelerator not in ACCELERATORS:
        raise DeviceError(f"unknown accelerator {accelerator!r}; there are: {', '.join(ACCELERATORS)}")
    machine = machine or here()
    if accelerator == "tpu":
        return _tpu(request, machine.tpus)
    cards = () if accelerator == "cpu" else machine.cards()
    if accelerator in ("gpu", "cuda"):
        if request.what == "cpu":
            raise DeviceError(
                f"--devices {request.typed} means CPU, --accelerator {accelerator} a GPU; leave one of them out"
            )
        if not cards:
            raise DeviceError(f"--accelerator {accelerator}: {_why_no_card(machine)}; write --accelerator cpu or auto")
    if request.what == "cpu":
        return _cpu(1)
    if not cards:
        if request.what in ("all", "list"):
            why = "--accelerator cpu was written" if accelerator == "cpu" else _why_no_card(machine)
            raise DeviceError(
                f"--devices {request.typed} names GPUs, but {why}; write a number of CPU ranks, such as 2, or auto"
            )
        return _cpu(min(4, machine.cores) if request.what == "auto" else request.count)
    if request.what in ("auto", "free"):
        return _leased(request, cards, machine, oversubscribe)
    if request.what == "count":
        return _cuda(_dealt(range(len(cards)), request, oversubscribe), cards)
    return _cuda(range(len(cards)) if request.what == "all" else _listed(request, cards, oversubscribe), cards)


def threads_per_rank(world_size: int, cores: int) -> int:
    """A rank's fair share of the cores, at least 1: more threads than cores slow every rank down."""
    return max(1, cores // max(1, world_size))


def _parse(spec: Spec, quoted: bool) -> _Request:
    typed = repr(spec) if quoted else str(spec)
    read: Spec = _read(spec, quoted) if isinstance(spec, str) else spec
    if read is None:
        return _Request("cpu", typed)
    if isinstance(read, str):
        return _Request("auto", typed) if read == "auto" else _Request("free", typed, count=int(read[5:]))
    if isinstance(read, int) and not isinstance(read, bool) and read >= -1:
        return _Request({-1: "all", 0: "cpu"}.get(read, "count"), typed, count=read)
    if (
        isinstance(read, Sequence)
        and not isinstance(read, bytes)
        and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in read)
    ):
        return _Request("list" if read else "cpu", typed, indices=tuple(int(i) for i in read))
    raise DeviceError(f"--devices {typed} is not understood; {VALID}")


def _read(written: str, quoted: bool) -> Spec:
    """The None, int or list that a string stands for, or `auto`, or `free:N`; -2 for nonsense."""
    text = written.strip().lower()
    if text == "auto" or re.fullmatch(r"free:0*[1-9]\d*", text, re.ASCII):
        return text
    if text == "none":
        return None
    if text == "-1" or (not quoted and re.fullmatch(r"\d+", text, re.ASCII)):
        return int(text)
    # "1, 3", "[1, 3]", "1," and "[]"
    if re.fullmatch(r"\[\s*\]|(\[)?\s*\d+(\s*,\s*\d+)*\s*,?\s*(?(1)\])", text, re.ASCII):
        return [int(index) for index in re.findall(r"\d+", text)]
    return -2


def _cpu(ranks: int) -> Devices:
    return Devices(kind="cpu", names=("cpu",) * ranks)


def _tpu(request: _Request, there: int) -> Devices:
    """TPU cores: one, or all of the host, because XLA knows nothing between."""
    if not there:
        raise DeviceError("--accelerator tpu: no TPU is visible on this machine; write --accelerator cpu or auto")
    if request.what == "cpu":
        raise DeviceError(f"--devices {request.typed} means CPU, --accelerator tpu a TPU; leave one of them out")
    have = f"there {'is 1 TPU core' if there == 1 else f'are {there} TPU cores'}"
    if request.what == "list":
        if len(request.indices) != 1:
            raise DeviceError(f"--devices {request.typed}: of TPU cores, a list names one, as in [0]; or write {there}")
        if request.indices[0] >= there:
            raise DeviceError(f"--devices {request.typed}: {have}, counted from 0")
        return Devices(kind="tpu", names=("xla:0",), uuids=(str(request.indices[0]),))
    count = request.count if request.what in ("count", "free") else there
    if count not in (1, there):
        raise DeviceError(f"--devices {request.typed}: {have}; XLA takes 1 or all of them")
    return Devices(kind="tpu", names=("xla:0",) * count)


def _cuda(indices: Sequence[int], cards: tuple[Gpu, ...], lease: Lease | None = None) -> Devices:
    return Devices(
        kind="cuda",
        names=tuple(f"cuda:{index}" for index in indices),
        uuids=tuple(cards[index].uuid for index in indices),
        lease=lease,
    )


def _dealt(indices: Sequence[int], request: _Request, oversubscribe: bool, what: str = "") -> list[int]:
    """The requested number of cards, round robin over `indices` where ranks may share one."""
    if request.count > len(indices) and not oversubscribe:
        have = f"{len(indices)} GPU{'s' if len(indices) != 1 else ''}"
        raise DeviceError(
            f"--devices {request.typed} asks for {request.count} GPUs and there {'is' if len(indices) == 1 else 'are'} "
            f"{have}{what}; write a smaller number, or add --oversubscribe to put several ranks on one card"
        )
    return [indices[rank % len(indices)] for rank in range(request.count)]


def _listed(request: _Request, cards: tuple[Gpu, ...], oversubscribe: bool) -> tuple[int, ...]:
    missing = [index for index in request.indices if index >= len(cards)]
    if missing:
        names = ", ".join(str(index) for index in range(len(cards)))
        raise DeviceError(f"--devices {request.typed}: there is no GPU {missing[0]}; there are: {names}")
    if len(set(request.indices)) < len(request.indices) and not oversubscribe:
        raise DeviceError(
            f"--devices {request.typed} names a GPU twice; name each once, or add --oversubscribe to put several "
            "ranks on one card"
        )
    return request.indices


def _leased(request: _Request, cards: tuple[Gpu, ...], machine: Machine, oversubscribe: bool) -> Devices:
    """Cards that nobody else is using; those that this process leased before come first."""
    wanted = len(cards) if request.what == "auto" else request.count
    from nbtrain.machine.leases import Lease

    lease = Lease(machine.leases)
    taken: list[int] = []
    why: list[str] = []
    try:
        for index in sorted(range(len(cards)), key=lambda i: (not lease.held_here(cards[i].uuid), i)):
            if len(taken) == wanted:
                break
            used = None if lease.held_here(cards[index].uuid) else _used_by(cards[index], machine)
            if used is None and lease.add(cards[index].uuid):
                taken.append(index)
            else:
                pid = lease.holder(cards[index].uuid)
                why.append(f"GPU {index} {used or f'is leased by another notebook of yours (process {pid})'}")
        if not taken:
            raise DeviceError(
                f"--devices {request.typed}: no GPU is free ({'; '.join(why)}); write -1 for all of them anyway, "
                '"0" in quotes for GPU 0, or 0 for CPU'
            )
        taken.sort()
        if request.what == "free":
            taken = _dealt(taken, request, oversubscribe, f" that nobody is using ({'; '.join(why)})" if why else "")
        return _cuda(taken, cards, lease)
    except BaseException:
        lease.close()
        raise


def _used_by(card: Gpu, machine: Machine) -> str | None:
    for user in card.users:
        if user.pid not in machine.mine:
            size = f", {humanize.size(user.memory)}" if user.memory else ""
            return f"is used by process {user.pid}{size}"
    unexplained = card.used - sum(user.memory or 0 for user in card.users)
    if unexplained > UNEXPLAINED and not machine.cuda_here and not card.users:
        return f"has {humanize.size(unexplained)} in use by a process that cannot be seen from here"
    return None


def _why_no_card(machine: Machine) -> str:
    if machine.gpus and machine.visible is not None:
        return f"CUDA_VISIBLE_DEVICES={machine.visible!r} shows none of the {len(machine.gpus)} GPUs that are here"
    return "no NVIDIA GPU is visible on this machine"
