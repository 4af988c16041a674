"""What a wrong word of a line was meant to be, so that an error says what to write instead of listing all there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

OF_OTHERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("-n", "-np", "--ranks", "--nproc", "--nproc-per-node", "--num-processes", "--gpus", "--num-gpus",
         "--world-size"),
        "--devices",
    ),
    **dict.fromkeys(("-N", "--nnodes", "--num-nodes", "--num-machines"), "--nodes"),
    "--mixed-precision": "--precision",
    "--gradient-accumulation-steps": "--accumulate",
    "--accumulate-grad-batches": "--accumulate",
}  # fmt: skip
"""options of torchrun, accelerate, Lightning and mpirun → those of the same meaning"""
BEGINNING = 2
"""letters of a name from which on it is taken for the beginning of another one"""


def similar(typed: str, names: Iterable[str], most: int = 1) -> str:
    """`; did you mean --devices?`, or nothing. Upper and lower case are the same. Names that begin with what was typed
    come first, and one that looks more like it second: `stat` is status, but may be a mistyped start."""
    typed, known = typed.lower(), list(names)
    close = [name for name in known if name.lower() == typed]
    if not close:
        begun = [name for name in known if len(typed.strip("-")) >= BEGINNING and name.lower().startswith(typed)]
        by_lower = {name.lower(): name for name in reversed(known)}
        looks_like = [by_lower[match] for match in get_close_matches(typed, by_lower, n=most)]
        close = list(dict.fromkeys([*begun, *looks_like]))[: max(most, 2 if begun else 0)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def which(typed: str, names: Iterable[str], listed: str, most: int = 1) -> str:
    """What to write instead of a name that is none: the likely one, or so many, or the list of all."""
    return similar(typed, names, most) or f"; there are {listed}"


def similar_flag(typed: str, flags: Iterable[str]) -> str:
    """As `similar`, for options: also by the name that they have elsewhere."""
    known = list(flags)
    return of_others(typed, known) or similar(typed, known)


def of_others(typed: str, flags: Iterable[str]) -> str:
    """The hint for an option of another tool, or nothing."""
    same = OF_OTHERS.get(typed, "")
    return f"; did you mean {same}?" if same in flags else ""
