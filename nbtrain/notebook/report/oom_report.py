"""What the user is told when memory ran out: how much each rank had, and what needs less."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping

import nbtrain.base.humanize as humanize
import nbtrain.machine.host as host
from nbtrain.base.events import Failed, Memory
from nbtrain.engines.base import Death

_ALLOCATOR = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory|bad_alloc", re.IGNORECASE)
LESS = (
    "Smaller batches need less memory, and --accumulate N makes the same steps of them; fewer ranks (--devices) leave "
    "more for each."
)

_SENT_BY: dict[int, str] = {
    signal.SIGKILL: "SIGKILL can also come from a user, a job scheduler or a container's limit.",
    signal.SIGTERM: "A user or a job scheduler sends SIGTERM.",
    signal.SIGSEGV: "Compiled code used memory that is not its own: an error in a library or an extension.",
    signal.SIGABRT: "Compiled code gave up: a failed check of its own, which it usually prints.",
    signal.SIGBUS: "A file in memory could not grow: /dev/shm is full, or it became shorter.",
    signal.SIGFPE: "Compiled code divided an integer by zero.",
    signal.SIGILL: "A library was compiled for another processor.",
}
"""what a signal means besides lack of memory"""
OF_MEMORY = (signal.SIGKILL, signal.SIGBUS)
"""signals that the system sends where it has no memory; a SIGABRT may follow a failed allocation, which says so"""
MUCH = 0.5
"""of the memory: ranks that had less together were hardly ended for want of it"""
ON_A_GPU = (
    "On a GPU, a step needs less with foreach=False in the optimizer; print(torch.cuda.memory_summary()) below %%rank 0"
    " says what it is; and what torch says above of its allocator goes into os.environ, before %distributed restart."
)


def ran_out(failed: Failed) -> bool:
    if failed.name in ("MemoryError", "OutOfMemoryError"):
        return True
    return _ALLOCATOR.search(failed.text) is not None  # libraries put it into errors of their own


def readings(last: Mapping[int, Memory], pids: Mapping[int, int], less: str = LESS) -> str:
    """Each rank's memory. `last`: the last reading of each while the cell ran. `less`: what needs less."""
    ranks, on_gpu = [], False
    for rank, pid in sorted(pids.items()):
        peak = host.peak_memory(pid)
        said = last.get(rank)
        parts = []
        if said is not None:
            parts.append(f"{humanize.size(said.process)} a moment ago")
        if peak is not None:
            parts.append(f"{humanize.size(peak)} at most")
        if said is not None and said.reserved:
            parts.append(f"{humanize.size(said.allocated)} of its GPU, {humanize.size(said.peak)} at most")
            on_gpu = True
            if said.retries:
                parts.append(f"its allocator's cache emptied {said.retries} × to get that")
        if parts:
            ranks.append(f"rank {rank} had {', '.join(parts)}")
    memory = host.memory()
    here = f"{humanize.size(memory.limit)} may be used here, {humanize.size(memory.available)} of it are free now"
    return f"Memory: {'; '.join([*ranks, here])}. {less}{f' {ON_A_GPU}' if on_gpu else ''}"


def of_the_dead(
    death: Death, killer: bool | None, ranks: int = 1, less: Callable[[], str] = lambda: LESS, tail: str = ""
) -> str:
    """The sentences after a death. `killer`: a process here has since been ended for lack of memory; None: one of this
    machine, as also where a rank is in a cgroup of its own. `ranks`: so many share the memory. `less` says what needs
    less; it is asked where memory is the likely cause. `tail`: what the rank has printed last."""
    there = host.memory().limit if death.limit is None else death.limit
    had = f"rank {death.rank} had {humanize.size(death.peak)} of {humanize.size(there)} at most" if death.peak else ""
    if death.signal == signal.SIGKILL and killer and death.limit is None:
        return f"The system's out-of-memory killer ended it{f': {had}' * bool(had)}. {less()}".rstrip()
    if death.signal == signal.SIGKILL and killer is None and death.limit is None:
        own = "the system's out-of-memory killer has ended a process of this machine meanwhile, in another cgroup"
        return f"Memory probably ran out: {own}{f'; {had}' * bool(had)}. {less()}".rstrip()
    if death.signal == signal.SIGABRT and _ALLOCATOR.search(tail):
        return f"Memory ran out{f': {had}' * bool(had)}. {less()}".rstrip()
    sent = _SENT_BY.get(death.signal or 0, "")
    if not had or death.signal not in OF_MEMORY:
        return sent
    if death.peak * ranks >= MUCH * there:
        return f"Memory probably ran out: {had}. {sent} {less()}".rstrip()
    if death.limit is not None:  # whether a process was ended there for lack of memory is not known here
        return f"{sent} {had[0].upper()}{had[1:]}."
    return f"{sent} It was probably not memory: {had}."
