"""What a rank did not find although the notebook has it: names in strings cannot be seen when a cell is sent."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from nbtrain.events import Failed
from nbtrain.exchange.names import private
from nbtrain.session.traffic import Traffic

_MISSING = (
    re.compile(r"name '(\w+)' is not defined"),
    re.compile(r"(?:local variable|variable) '(\w+)' is not defined"),  # pandas: df.query('@x')
    re.compile(r"module '__main__' has no attribute '(\w+)'"),
)
_TABLE = re.compile(r"\b(?:globals|locals|vars)\(\)|\buser_ns\b")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def hint(failed: Failed, namespace: Mapping[str, Any], sent: Container[str], traffic: Traffic) -> str:
    """A sentence below the error, or nothing. `sent`: the names that the cell was seen to read."""
    name = _missing(failed)
    if name is None or name not in namespace or private(name) or name in ("exit", "quit"):
        return ""
    if name in traffic.left:
        return f"The notebook has {name!r}, and it was left behind: {traffic.why_left(name)}"
    if name in sent:
        return ""
    return (
        f"The notebook has {name!r}, but the cell reads it in a way that cannot be seen beforehand (eval, globals(), a "
        f"string), so it was not sent. Write its name in the cell, a line with nothing but\n    {name}\nis enough."
    )


def _missing(failed: Failed) -> str | None:
    if failed.name == "KeyError":  # of the user's own dicts there are many
        lines = [_COLOURS.sub("", line) for block in failed.lines for line in block.splitlines()]
        tables = any(line.lstrip().startswith("--") and _TABLE.search(line) for line in lines)
        found = re.fullmatch(r"'(\w+)'", failed.text)
        return found[1] if found and tables else None
    if not failed.name.endswith(("NameError", "UndefinedVariableError", "AttributeError")):
        return None
    for pattern in _MISSING:
        if found := pattern.search(failed.text):
            return found[1]
    return None
