"""Turns what the ranks raised into one exception of the original type, with the notebook's own lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import nbtrain.base.humanize as humanize
import nbtrain.machine.host as host
from nbtrain.base.errors import IN_FULL, CellSyntaxError, RankDied, RankError, UsageError
from nbtrain.base.events import Failed
from nbtrain.compat import kernel
from nbtrain.engines.base import Death, Frame
from nbtrain.notebook.report.oom_report import LESS, of_the_dead
from nbtrain.notebook.report.stacks import place

AS_BEFORE = "The notebook is as it was before this cell."


def exception(
    failed: Mapping[int, Failed],
    stuck: Iterable[int],
    world_size: int,
    kept_text: str,
    open_packed: Callable[[int, bytes], Any],
    hint: Callable[[Failed], str],
    numbers: Mapping[str, int],
) -> BaseException:
    """The exception of the first failure that was not our interrupt. `held`: a sentence on what is left on the ranks.
    `hint` adds a sentence. `numbers`: of the notebook's cells. `stuck`: ranks that had to be ended."""
    shown = first(failed)
    like = shown.name, shown.text, shown.relayed
    same = sorted(f.rank for f in failed.values() if (f.name, f.text, f.relayed) == like)
    others = sorted(f.rank for f in failed.values() if f.rank not in same and not (f.interrupted or f.relayed))
    error = _original(shown, open_packed)
    freed: dict[str, list[int]] = {}
    for rank in sorted(failed):
        if failed[rank].interrupted and rank not in same:
            at = place([Frame(*frame) for frame in failed[rank].frames], numbers)
            freed.setdefault(at, []).append(rank)
    where = _where(same, others, freed, sorted(stuck), failed, world_size, kept_text)
    help_ = hint(shown)
    lines = [*shown.lines, *(["\n" + help_] if help_ else []), *([where] if where else [])]
    if isinstance(error, SyntaxError):  # IPython shows those in a way of its own, with the stack of the magic
        error = CellSyntaxError(f"{shown.name}: {shown.text}", lines)
    error.__cause__ = RankError("\n".join(lines))
    if isinstance(error, UsageError):
        if not any(error.steps for error in failed.values()):  # one line says it all
            return error
        setattr(error, IN_FULL, True)
    with suppress(AttributeError):  # a class with slots: IPython shows its own traceback, with ours as the cause
        kernel.show_as(error, lines)
    return error


def first(failed: Mapping[int, Failed]) -> Failed:
    """The failure that is shown, of the rank that a debugger opens: the first that was not our interrupt; where several
    ranks have raised the same, that of the lowest."""
    first_of_all = min(failed.values(), key=lambda f: (f.interrupted, f.relayed, f.time))
    alike = [error for error in failed.values() if _likeness(error) == _likeness(first_of_all)]
    return min(alike, key=lambda f: f.rank)


def _likeness(failed: Failed) -> tuple[bool, bool, str, str]:
    """Equal for what ranks have raised at the same place: numbers in the text may be the rank's own."""
    return failed.interrupted, failed.relayed, failed.name, re.sub(r"\d+", "0", failed.text)


def _original(failed: Failed, open_packed: Callable[[int, bytes], Any]) -> BaseException:
    if failed.exception is not None:
        try:
            error = open_packed(failed.rank, failed.exception)
            if isinstance(error, tuple):  # its own __init__ must not run again
                cls, args, attributes = error
                error = cls.__new__(cls, *args)
                vars(error).update(attributes)
        except Exception:  # classes that pickle and do not unpickle; the text remains
            error = None
        if isinstance(error, BaseException):
            with suppress(Exception):  # without a text it cannot be shown
                str(error)
                return error
    return RankError(f"{failed.name}: {failed.text}")


def _where(
    same: list[int], others: list[int], freed: Mapping[str, list[int]], stuck: list[int],
    failed: Mapping[int, Failed], world_size: int, kept_text: str,
) -> str:  # fmt: skip
    if world_size == 1:
        return kept_text and f"\n{AS_BEFORE} {kept_text}"
    parts = [f"raised on {_ranks(same, world_size)}"]
    if others:
        parts.append("; ".join(f"rank {rank} raised {failed[rank].name}: {failed[rank].text}" for rank in others))
    for at, ranks in freed.items():
        parts.append(f"{_ranks(ranks, world_size)} {_was(ranks)} stopped {at or 'where the GPU waited for that'}")
    if stuck:
        parts.append(f"{_ranks(stuck, world_size)} did not end, and {_was(stuck)} replaced")
    if lost := sorted(rank for rank in failed if failed[rank].card_lost):
        parts.append(f"{_ranks(lost, world_size)} can use the GPU no more, and {_was(lost)} replaced")
    return "\n" + "; ".join(parts) + f". {AS_BEFORE} {kept_text}".rstrip()


def _was(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return f"all {world_size} ranks"
    return humanize.ranks(ranks)


def _once(less: Callable[[], str]) -> Callable[[], str]:
    """The advice the first time it is asked for, nothing afterwards: one is enough for all ranks."""
    asked = iter([less])
    return lambda: next(asked, str)()


def _at(death: Death, numbers: Mapping[str, int]) -> str:
    """Where it crashed, or was last seen."""
    if death.frames:
        return f" {place(list(death.frames), numbers)}"
    return f", last seen {seen}" if (seen := place(list(death.last_seen), numbers)) else ""


def died(
    deaths: Iterable[Death],
    tails: Mapping[int, str],
    numbers: Mapping[str, int],
    killer: bool | None,
    kept_text: str = "",
    less: Callable[[], str] | None = None,
    together: int = 1,
) -> RankDied:
    """The error for dead ranks. `tails`: the last lines they printed. `numbers`: of the notebook's cells. `killer`: see
    `of_the_dead`. `less` returns what needs less memory. `together`: ranks on one machine."""
    parts = []
    once = _once(less or (lambda: LESS))
    machines: dict[tuple[str, str], list[int]] = {}
    unborn: dict[str, list[int]] = {}
    for death in deaths:
        if death.machine:
            machines.setdefault((death.machine, death.said), []).append(death.rank)
            continue
        if not death.pid and death.said:
            unborn.setdefault(death.said, []).append(death.rank)
            continue
        said = tails.get(death.rank, "")
        limit = host.of_processes(f"{death.said}\n{said}")
        if death.said in said:  # once is enough
            death = replace(death, said="")
        parts.append(f"{death}{_at(death, numbers)}" + (f"; the last it said:\n{said}" if said else ""))
        if limit:
            parts.append(f"{limit[0].upper()}{limit[1:]}.")
        elif why := of_the_dead(death, killer, together, once, said):
            parts.append(why)
    parts += [f"{humanize.ranks(ranks)} could not be started: {why}" for why, ranks in unborn.items()]
    for (machine, why), ranks in machines.items():
        were = "was" if len(ranks) == 1 else "were"
        parts.append(f"{humanize.ranks(ranks)} {were} lost with the machine {machine}: {why}")
    return RankDied("\n".join([*parts, f"{AS_BEFORE} {kept_text}".rstrip()]))
