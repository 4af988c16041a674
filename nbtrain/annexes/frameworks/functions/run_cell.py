"""Runs a text as a cell below `%%distributed`, from a function that was called in an ordinary cell."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.compat import kernel
from nbtrain.machine import registry
from nbtrain.worker.shell.run_script import in_a_script


def notebook() -> Any:
    """The shell of the notebook, with nbtrain loaded; None in a script, also in one that ranks run."""
    if in_a_script():
        return None
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and "nbtrain" not in shell.extension_manager.loaded:
        shell.run_line_magic("load_ext", "nbtrain")
    return shell


def script_here() -> Any:
    """Of a script, the process as a rank; None in a notebook."""
    if notebook() is not None:
        return None
    from nbtrain.annexes.frameworks.functions.script_rank import script_rank

    return script_rank()


def on_machines(line: str) -> bool:
    """Whether a cell with this line would have ranks on several machines."""
    from nbtrain.notebook.magics.extension import state_here  # not on a rank

    state: Any = state_here()
    return registry.engine(state.read(line).over(state.defaults).value("engine")).remote


def outlives(line: str) -> bool:
    """Whether this line hands its cell over, to a run that outlives the notebook."""
    return not {"--detach", "--until"}.isdisjoint(line.replace("=", " ").split())


@contextmanager
def shell_of_script() -> Iterator[None]:
    """A script has a shell meanwhile, as a notebook, for a run that outlives it. Its names are the script's."""
    if on_a_rank() or "RANK" in os.environ:
        raise UsageError(
            "detach=True hands a call over once, and this script runs in each of several processes: start it with "
            "python train.py, and the run starts its ranks by itself"
        )
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    quiet = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell.instance(config=quiet, user_module=sys.modules["__main__"])
    try:
        shell.run_line_magic("load_ext", "nbtrain")
        yield
        print("nbtrain: the script may end; in a terminal python -m nbtrain runs lists its run, and ends it")
    finally:
        with redirect_stdout(StringIO()):  # it says that ranks were stopped: not those of the run
            shell.run_line_magic("unload_ext", "nbtrain")
        InteractiveShell.clear_instance()


def run_cell(shell: Any, line: str, text: str, names: dict[str, Any]) -> Any:
    """Returns what the cell does: a run, where it is handed over. `names` are in the notebook's namespace, hidden from
    %who. They stay, so that the next call sends only what has changed."""
    shell.user_ns.update(names)
    shell.user_ns_hidden.update(names)
    from IPython.core.error import UsageError as OneLine  # not on a rank

    try:
        return shell.run_cell_magic(_magic(shell), line, text)
    except OneLine as error:  # what a magic says in one line, as an error of ours, which a program can catch
        raise UsageError(str(error)) from None


@contextmanager
def errors_in_short() -> Iterator[None]:
    """nbtrain's errors without their stack."""
    try:
        yield
    except NbtrainError as error:
        if kernel.renders(error) is None:
            kernel.show_as(error, [f"{type(error).__name__}: {error}"])
        raise


def on_a_rank() -> bool:
    return hasattr(builtins, "world_size")


def refuse_on_a_rank(what: str) -> None:
    """A script that ranks run calls it in each process, as under torchrun."""
    if on_a_rank() and not (in_a_script() and not script_here().running):
        raise UsageError(
            f"{what} is called in an ordinary cell, without %%distributed: it starts a cell on the ranks itself"
        )


def _magic(shell: Any) -> str:
    """The name of our magic: another extension may have had the usual one."""
    magic = shell.find_cell_magic("distributed")
    return "distributed" if getattr(magic, "__module__", "").startswith("nbtrain.") else "nbtrain"
