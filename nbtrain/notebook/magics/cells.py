"""Finds where a cell's body stands in the notebook, so that kernel and ranks both say `Cell In[5], line 3`."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtrain.base.errors import CellSyntaxError, UsageError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbtrain.notebook.cell import Cell


@dataclass(frozen=True, slots=True)
class RawCell:
    """The cell that runs, as `pre_run_cell` passes it: nothing else in IPython has it as it was typed."""

    raw: str
    stored: bool
    """it is in the history, so it has a number"""


def locate(
    shell: InteractiveShell, magic: str, line: str, body: str, seen: RawCell | None, number: int | None = None
) -> Cell:
    """The cell as the ranks need it. Raises if it is empty or not Python. `number`: of a cell that was run before;
    without it, the cell that runs."""
    from nbtrain.notebook.cell import Cell

    text = body.lstrip("\n") if not body.strip() else body
    lines = text.splitlines()
    blank = next((at for at, line in enumerate(lines) if line.strip()), None)
    if blank is None:
        raise UsageError(f"there is no code below %%{magic}; write the training loop there")
    start = _body_starts(seen.raw, magic, lines) if seen is not None else None
    stored = seen is not None and seen.stored
    count = number or (len(_inputs(shell)) - 1 if stored else shell.execution_count)
    if seen is None or start is None:  # run by a program, not typed into a cell
        raw, first, found_number = f"%%{magic} {line}\n{body}", 2, None
    else:
        raw, first, found_number = seen.raw, start, count if stored else None
    # The file name is IPython's own for this cell; its cache has only the line `run_cell_magic(...)`.
    filename = shell.compile.cache(raw, count, raw_code=raw)
    # Input transformers drop leading blank lines and would shift what follows.
    source = "".join(text.splitlines(keepends=True)[blank:])
    code = _checked(shell, source, filename, first + blank - 1, magic)
    return Cell(source=source, code=code, filename=filename, first_line=first + blank, number=found_number)


def _checked(shell: InteractiveShell, source: str, filename: str, above: int, magic: str) -> str:
    """Finds syntax errors before anything is started. Magics, `!cmd` and top-level await are fine."""
    flags = shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    shift = above
    try:
        code: str = "\n" * above + shell.transform_cell(_no_magic(source))
        shift = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks compile it too and will warn
            tree: Any = shell.compile.ast_parse(code, filename)
            compile(tree, filename, "exec", flags, True)
    except SyntaxError as error:
        error.filename = filename
        if shift and error.lineno is not None:
            error.lineno += shift
        rendering: Any = shell.SyntaxTB
        lines = rendering.structured_traceback(type(error), error, [])
        message = f"{type(error).__name__}: {error.msg} (line {error.lineno} of the cell)"
        raise CellSyntaxError(message, list(lines)) from None
    except (ValueError, OverflowError) as error:  # null bytes, numbers that are too large
        raise UsageError(f"the cell cannot be compiled: {error}") from None
    if not tree.body:
        raise UsageError(f"there are only comments below %%{magic}; write the training loop there")
    return code


def _no_magic(source: str) -> str:
    """Keep IPython from taking the one-line cell `save("best")`, the ranks' `save`, for its own magic of that name."""
    from nbtrain.notebook.sync.captured_names import ON_RANKS

    called = re.match(r"\s*(\w+)\s*\(", source)
    return source.rstrip("\n") + "\n#\n" if called and called[1] in ON_RANKS else source


def _body_starts(raw: str, magic: str, body: list[str]) -> int | None:
    """The line, from 1, below the magic's own; None if the body is not from this cell."""
    lines = raw.splitlines()
    for at, line in enumerate(lines):
        if line.strip().startswith(f"%%{magic}"):
            below = lines[at + 1 :]
            # there may be more lines below
            same = len(below) >= len(body) and all(a.strip() == b.strip() for a, b in zip(below, body))  # noqa: B905
            return at + 2 if same else None
        if line.strip() and not line.strip().startswith("%%"):  # %%time may stand above
            return None
    return None


def _inputs(shell: InteractiveShell) -> list[str]:
    # `execution_count` inside a cell is this cell's number in IPython 7 and the next one's in 9.
    manager = shell.history_manager
    return [""] if manager is None else manager.input_hist_parsed
