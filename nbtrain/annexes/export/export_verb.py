"""`%distributed export train.py`: a cell, with what it needs of the notebook, as a script for torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nbtrain.annexes import batch_file
from nbtrain.base.atomic_write import refuse_existing
from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.base.events import RESULT
from nbtrain.notebook.magics.asked_cell import asked_cell
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

TAKES = "--cell N, --resume, --notebook, --slurm, --force"
LOOKS_ON = re.compile(r"%%(time|capture|prun)\b")
LOOKS_ON_A_LINE = re.compile(r"^([ \t]*)%(?:time|prun)[ \t]+(?=[^-\s])", re.MULTILINE)
"""`%time fit(model)`"""
DISTRIBUTED = re.compile(r"\s*%%(distributed|nbtrain|rank)\b[^\n]*\n?")


def export(state: MagicsState, request: Request) -> str:
    own = dict(request.own)
    number = own.pop("--cell", None)
    switches = {name: name in own for name in ("--resume", "--notebook", "--slurm", "--force")}
    if wrong := [name for name in own if name not in switches]:
        raise UsageError(f"export has no option {wrong[0]}; it takes {TAKES}")
    words = [word.plain for word in (*request.words[1:], *own.values()) if word is not None]  # a switch takes no value
    if len(words) != 1:
        raise UsageError(f"export takes the name of a file: %distributed export train.py, and {TAKES}")
    if number is not None and not number.plain.isdecimal():
        raise UsageError(f"--cell {number.text}: the number of a cell, as In[12] has it")
    cell, line, base = asked_cell(state, int(number.plain) if number is not None else None)
    if RESULT in cell.code:
        raise NotSupported(
            "export: nbtrain.run calls a function, and runs under torchrun as it stands; to have a script without "
            "nbtrain, write the function's body in a %%distributed cell"
        )
    if "lightning_work" in cell.code:
        raise NotSupported(
            "export: Lightning's Trainer runs in a script by itself: put the cells that make the module and call fit "
            "into train.py, with Lightning's own strategy, as strategy='ddp' in the place of 'nbtrain_ddp'"
        )
    return _export(state, cell, line, base, Path(words[0]).expanduser(), switches)


def _export(
    state: MagicsState, cell: Any, line: Request, base: Request, path: Path, switches: dict[str, bool]
) -> str:  # fmt: skip
    from nbtrain.annexes.export.script import export, write
    from nbtrain.annexes.export.source import Source

    run = state.devices.run(line, base, state.notebook)
    history: Any = state.shell.history_manager
    typed, parsed = history.input_hist_raw, history.input_hist_parsed
    last = cell.number if cell.number is not None else len(typed) - 1
    before = range(1, min(last, len(typed)))
    ran = [at for at in before if typed[at] and at not in state.failed]
    plain = {at: text for at in ran if (text := _python(state.shell, typed[at], parsed[at])) is not None}
    others = {at: DISTRIBUTED.sub("", typed[at], count=1) for at in before if DISTRIBUTED.match(typed[at])}
    objects = path.with_name(f"{path.stem}_objects.pt")
    options = f" {line}" if str(line) else ""
    exported = export(
        Source(
            title=f"Cell [{last}] of a notebook, %%distributed{options}",
            cell=cell.source, number=last, history=plain, others=others, namespace=state.notebook, run=run,
            objects=objects.name, checkpoint=f"{path.stem}_last.pt" if switches["--resume"] else "",
            latest=not any(DISTRIBUTED.match(text) for text in typed[last + 1 :]),
        )
    )  # fmt: skip
    said = [f"nbtrain: {note}" for note in exported.notes]
    if switches["--notebook"]:
        path = path.with_suffix(".ipynb")
        text = _notebook(
            [
                *exported.cells,
                typed[last] if DISTRIBUTED.match(typed[last]) else f"%%distributed{options}\n{cell.source}",
            ]
        )
        refuse_existing([path], switches["--force"])
        write(path, text, {}, objects)
        said = [line for line in said if "saved beside" not in line]
        return "\n".join([*said, f"written: {path}, {len(exported.cells) + 2} cells"])
    batch = path.with_suffix(".sbatch")
    files = [path, *([objects] if exported.saved else []), *([batch] if switches["--slurm"] else [])]
    refuse_existing(files, switches["--force"])
    write(path, exported.text.replace("{}", path.name, 1), exported.saved, objects)
    ranks = run.pool.world_size
    if switches["--slurm"]:
        write(batch, _sbatch(path.name, ranks), {}, objects)
    start = f"torchrun --nproc-per-node {ranks} {path}" if ranks > 1 else f"python {path}"
    return "\n".join([*said, f"written: {', '.join(map(str, files))}. Run it with: {start}"])


def _python(shell: Any, typed: str, parsed: str) -> str | None:
    """A cell's code, without magics that only look on while it runs; None: another language, or nbtrain's own."""
    text = typed.lstrip()
    while LOOKS_ON.match(text):
        text = text.partition("\n")[2].lstrip()
    if text.startswith("%%"):
        return None
    plain = LOOKS_ON_A_LINE.sub(r"\1", text)
    return str(shell.transform_cell(plain)) if plain != typed.lstrip() else parsed


def _notebook(cells: list[str]) -> str:
    texts = ["%load_ext nbtrain", *cells]
    made: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": f"cell-{at}",
            "execution_count": None,
            "metadata": {},
            "outputs": [],
            "source": text.strip("\n"),
        }
        for at, text in enumerate(texts)
    ]
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _sbatch(script: str, ranks: int) -> str:
    head = batch_file.head(script.removesuffix(".py"), 1, [f"--gpus-per-node={ranks}", f"--cpus-per-task={4 * ranks}"])
    return f"#!/bin/bash\n{head}\nsrun torchrun --standalone --nproc-per-node {ranks} {script}\n"
