"""Adds a hint to an error: of a name that a rank did not find, tensors on several devices, a disk that is full."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

import nbtrain.base.humanize as humanize
import nbtrain.machine.host as host
from nbtrain.base.events import Failed
from nbtrain.exchange.names.cell_names import of_ipython, private
from nbtrain.notebook.sync.captured_names import ON_RANKS
from nbtrain.notebook.sync.notebook_side import NotebookSide

_MISSING = (
    re.compile(r"name '(\w+)' is not defined"),
    re.compile(r"(?:local variable|variable) '(\w+)' is not defined"),  # pandas: df.query('@x')
    re.compile(r"module '__main__' has no attribute '(\w+)'"),
)
_TABLE = re.compile(r"\b(?:globals|locals|vars)\(\)|\buser_ns\b")
_DEVICES = re.compile(
    r"[Ee]xpected all tensors to be on the same device|Input type .* and weight type .* should be the same"
)
OF_NBTRAIN = sorted(ON_RANKS - {"get_ipython", "display"})
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


DEVICES = (
    "Batches of a DataLoader and what a model holds are on the rank's device. A tensor that forward makes is where you "
    "make it: torch.zeros(…, device=x.device), x.new_zeros(…) or .type_as(x); one that stays belongs to the model, "
    'self.register_buffer("mask", …) in __init__; in the cell itself, .to(device).'
)


LOST_CARD = (
    "After such an error CUDA lets a process compute no more: the rank is replaced, and what it held is sent again "
    "with the next cell. CUDA tells of it late, so the line may be a later one than the one at fault: %env "
    "CUDA_LAUNCH_BLOCKING=1, %distributed restart and this cell once more show that line; with --accelerator cpu the "
    "error says what was wrong, such as a label that is larger than the number of classes."
)


def hint(
    failed: Failed,
    namespace: Mapping[str, Any],
    sent: Container[str],
    side: NotebookSide,
    writes: Container[str] = (),
) -> str:
    """A sentence to show below the error, or nothing. `sent`, `writes`: the names that were found to be read by the
    cell, and to be assigned in it."""
    if failed.card_lost:
        return LOST_CARD
    if failed.name in ("OSError", "RuntimeError", "BlockingIOError") and (room := _no_room(failed)):
        return room
    if failed.name == "RuntimeError" and _DEVICES.search(failed.text):
        return DEVICES
    if failed.name == "TypeError" and (name := _called(failed)):
        if name in namespace:
            return f"{name} is the notebook's own here; `del {name}` gives nbtrain's."
        if name in writes or failed.text == f"{name}() takes no keyword arguments":  # as of a function written in C
            return f"{name} is the cell's own here; give it another name to call nbtrain's."
        return ""
    name = _missing(failed)
    if (
        name is None
        or name not in namespace
        or private(name)
        or of_ipython(name, namespace)
        or name in ("exit", "quit")
    ):
        return ""
    if name in side.left:
        return f"The notebook has {name!r}, and it was left behind: {side.why_left(name)}"
    if name in sent:
        return ""
    return (
        f"The notebook has {name!r}, but the cell reads it in a way that cannot be seen beforehand (eval, globals(), a "
        f"string), so it was not sent. Write its name in the cell, a line with nothing but\n    {name}\nis enough."
    )


def _no_room(failed: Failed) -> str:
    """What is full, where the error itself does not say so."""
    if why := host.of_processes(failed.text):
        return f"{why[0].upper()}{why[1:]}."
    if "[Errno 28]" in failed.text and any("synchronize.py" in block for block in failed.lines):
        space = host.shared_memory()
        large = f" of {humanize.size(space.total)}" if space is not None else ""
        return (
            f"/dev/shm{large} is full: a DataLoader's workers keep their locks and batches there. Write num_workers=0, "
            "or give the container more (docker run --shm-size=1g)."
        )
    if "iostream error" in failed.text:
        return (
            "That is how torch says that it could not write a file to its end: most often the disk is full, or a quota "
            "is used up. Make room, or write to another disk."
        )
    return ""


def _called(failed: Failed) -> str | None:
    """The name of a rank's built-in that is called in the line that raised, if it may be something else there."""
    marked = _marked(failed)
    for name in OF_NBTRAIN if marked else ():
        called = re.search(rf"(?<![\w.]){name}\(", marked[-1])
        if called and ("not callable" in failed.text or re.search(rf"\b{name}\(\)|'{name}'", failed.text)):
            return name
    return None


def _marked(failed: Failed) -> list[str]:
    """The lines of the traceback that were running, the innermost call last."""
    lines = [_COLOURS.sub("", line) for block in failed.lines for line in block.splitlines()]
    return [line for line in lines if line.lstrip().startswith("--") and "> " in line]


def _missing(failed: Failed) -> str | None:
    if failed.name == "KeyError":  # mostly of the user's own dicts
        tables = any(_TABLE.search(line) for line in _marked(failed))
        match = re.fullmatch(r"'(\w+)'", failed.text)
        return match[1] if match and tables else None
    if not failed.name.endswith(("NameError", "UndefinedVariableError", "AttributeError")):
        return None
    for pattern in _MISSING:
        if match := pattern.search(failed.text):
            return match[1]
    return None
