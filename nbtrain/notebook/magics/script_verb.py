"""`%distributed run train.py --lr 0.1`: a script that was written for torchrun, on the warm ranks."""

from __future__ import annotations

import inspect
import os
import shlex
from dataclasses import dataclass
from types import FrameType
from typing import Any

from IPython.utils.text import DollarFormatter

from nbtrain.base.errors import UsageError
from nbtrain.base.events import SCRIPT
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.line.split_line import split
from nbtrain.notebook.magics.state import MagicsState

WRITE = (
    "write %distributed run train.py, with options of %%distributed before the script and the script's own behind it"
)
CALL, PATH, WORDS = SCRIPT, "nbtrain_script", "nbtrain_arguments"


@dataclass(frozen=True, slots=True)
class Script:
    options: str
    path: str
    arguments: list[str]


def asked(state: MagicsState, line: str) -> Script | None:
    """What to run, if the verb is `run`: what is behind the script's name is not ours to read."""
    words = split(line, unfinished=True)
    at = next((at for at, word in enumerate(words) if word.text == "run"), None)
    if at is None or state.read(line[: words[at].start]).words:
        return None
    script = next((word for word in words[at + 1 :] if word.plain.endswith(".py")), None)
    if script is None:
        raise UsageError(f"run takes a script: {WRITE}")
    options = f"{line[: words[at].start]} {line[words[at].start + len('run') : script.start]}".strip()
    request = state.read(options)
    if request.words:
        raise UsageError(f"run takes a script, and {request.words[0].text!r} is none: {WRITE}")
    if "strategy" not in request.given:
        options = f"--strategy none {options}"
    name = _expanded(state.shell, script.plain)
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {name} in {os.getcwd()}")
    return Script(options.strip(), path, shlex.split(_expanded(state.shell, line[script.start + len(script.text) :])))


def _expanded(shell: Any, text: str) -> str:
    """`{lr}` and `$lr` are what the notebook has, as in the words of IPython's `%run`, or the function that calls it.
    What is none of it stays as it was typed."""
    names = dict(shell.user_ns)
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_globals is not shell.user_ns:
        frame = frame.f_back
    if frame is not None:
        names |= frame.f_locals
    try:
        expanded: str = DollarFormatter().vformat(text, args=(), kwargs=names)
    except Exception:  # IPython leaves such a line as it is, too
        return text
    return expanded


def run(state: MagicsState, script: Script, magic: str) -> None:
    """`magic`: the name of ours; another extension may have had the usual one."""
    from nbtrain.worker.shell.run_script import run_script  # on use

    names = {CALL: run_script, PATH: script.path, WORDS: script.arguments}
    state.notebook.update(names)
    try:
        state.shell.run_cell_magic(magic, script.options, f"# run {script.path}\n{CALL}({PATH}, {WORDS})")
    finally:
        for name in names:
            state.notebook.pop(name, None)


def behind_a_script(state: MagicsState, request: Request) -> None:
    raise UsageError(f"run takes a script: {WRITE}")
