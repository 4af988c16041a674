"""Train a model of your notebook on many processes or GPUs, from that notebook, with the loop you already wrote.

    %load_ext nbtrain

    %%distributed --strategy ddp --devices 4
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); optimizer.step(); optimizer.zero_grad()

Importing this module does nothing and loads nothing but the standard library; names load on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from IPython.core.interactiveshell import InteractiveShell

    from nbtrain.annexes.frameworks.functions.launchers import TorchDistributor, notebook_launcher
    from nbtrain.annexes.frameworks.functions.predict import predict
    from nbtrain.annexes.frameworks.functions.run import run
    from nbtrain.annexes.planning.plan.plan import Plan
    from nbtrain.base import errors
    from nbtrain.base.empty_models import empty
    from nbtrain.strategies.base import Component, Facts, Piece, Prepared, Promises, Shards, Strategy
    from nbtrain.strategies.kit.units_to_wrap import wrap
    from nbtrain.watch.runs.history import history

    # Builtins of a rank, declared here for editors.
    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    def log(*, sync: bool = False, **values: Any) -> None: ...
    def reduce(value: Any, op: str = "mean") -> Any: ...
    def gather(value: Any, of: Any = None, sync_grads: bool = False) -> Any: ...
    def barrier() -> None: ...
    def setup(*objects: Any) -> Any: ...

    from nbtrain.worker.checkpoints.api import load, resumable, save
    from nbtrain.worker.setup.whole import whole


__version__ = "0.1.0"

__all__ = [
    "Component",
    "Facts",
    "Piece",
    "Prepared",
    "Promises",
    "Shards",
    "Strategy",
    "TorchDistributor",
    "__version__",
    "background",
    "check",
    "empty",
    "errors",
    "history",
    "load",
    "load_ipython_extension",
    "notebook_launcher",
    "picker",
    "plan",
    "predict",
    "resumable",
    "run",
    "save",
    "unload_ipython_extension",
    "whole",
    "wrap",
]

ON_A_RANK = ("rank", "world_size", "local_rank", "device", "log", "reduce", "gather", "barrier", "setup")
"""Not in `__all__`: `from nbtrain import *` has to work in the notebook, where these do not exist."""

_WHERE = {
    **{
        name: f"nbtrain.strategies.base:{name}"
        for name in ("Component", "Facts", "Piece", "Prepared", "Promises", "Shards", "Strategy")
    },
    **{name: f"nbtrain.worker.checkpoints.api:{name}" for name in ("load", "resumable", "save")},
    "empty": "nbtrain.base.empty_models:empty",
    "errors": "nbtrain.base.errors",
    "history": "nbtrain.watch.runs.history:history",
    "whole": "nbtrain.worker.setup.whole:whole",
    "wrap": "nbtrain.strategies.kit.units_to_wrap:wrap",
}
"""Names that are loaded on use."""

_watches: dict[int, tuple[Callable[[], None], ...]] = {}
"""shell → what ends the watches for the cell that initialises CUDA, for a Trainer that would use DataParallel, and for
Lightning"""


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext nbtrain`"""
    from nbtrain.engines._local.warm import foresee

    foresee()  # it takes longest: what follows does not wait for it
    from nbtrain.exchange.local_files import note_executed
    from nbtrain.machine.data_parallel_warning import watch_transformers_trainer
    from nbtrain.notebook import annexes
    from nbtrain.notebook.magics.extension import load

    load(shell, doctor=_doctor)
    watches = watch_transformers_trainer(), annexes.watch_imports()
    _watches[id(shell)] = tuple(filter(None, watches))
    note_executed()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext nbtrain`, and the first half of `%reload_ext nbtrain`"""
    from nbtrain.engines._local.warm import close
    from nbtrain.notebook.magics.extension import unload

    unload(shell)
    close()
    for stop in _watches.pop(id(shell), ()):
        stop()


def check(*names: str) -> Any:
    """`%distributed check` for programs: true when these names of the notebook, or all, can travel to the ranks."""
    from nbtrain.notebook.magics.extension import session_here

    return session_here().check(list(names))


def background() -> Any:
    """The run that `%%distributed --background` started last: `wait()`, `stop()`, `metrics`. None: there was none."""
    from nbtrain.notebook.magics.extension import session_here

    return session_here().background


def plan(
    model: Any = None,
    batch: Any = None,
    *,
    optimizer: Any = None,
    devices: Any = None,
    accelerator: str | None = None,
    nodes: int | None = None,
    precision: str | None = None,
    accumulate: int | None = None,
    bandwidth: str | None = None,
    memory: str | None = None,
    goal: str = "speed",
    loss: str = "any",
) -> Plan:
    """`%distributed plan` for programs: what a model would need under each strategy, whether that fits, which to take.

    `model`, `batch` and `optimizer` are objects, or names of the notebook; what is left out is looked for there. The
    options mean what they mean behind `%%distributed`. `goal`: speed, batch or model, what is to be as large as can be,
    for no, small or any `loss` of speed.
    """
    from nbtrain.notebook import annexes
    from nbtrain.notebook.magics.extension import state_here

    options = {
        "devices": devices,
        "accelerator": accelerator,
        "nodes": nodes,
        "precision": precision,
        "accumulate": accumulate,
        "bandwidth": bandwidth,
        "memory": memory,
    }
    made: Plan = annexes.named("plan")(state_here(), model, batch, optimizer, options, goal, loss)
    return made


def picker(model: Any = None, batch: Any = None, **options: Any) -> Any:
    """`%distributed pick` for programs: choose a strategy, its options and devices on a form, and write the line.

    `model` and `batch` are objects, or names of the notebook. `options`: those of `%distributed pick`, by name.
    """
    from nbtrain.notebook import annexes
    from nbtrain.notebook.magics.extension import state_here

    return annexes.named("picker")(state_here(), model, batch, **options)


def __getattr__(name: str) -> Any:
    if name in ON_A_RANK:
        return _of_the_rank(name)
    if name in _WHERE:
        from pkgutil import resolve_name

        return resolve_name(_WHERE[name])
    from nbtrain.notebook import annexes

    if any(name in annex.names for annex in annexes.TABLE.values()):
        return annexes.named(name)
    raise AttributeError(f"module 'nbtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *ON_A_RANK})


def _doctor() -> str:
    # Passed to the magics, which are beside the doctor in the layers and may not import it.
    from nbtrain.notebook.doctor import report

    return report()


def _of_the_rank(name: str) -> Any:
    import builtins

    try:
        return getattr(builtins, name)
    except AttributeError:
        from nbtrain.base.errors import UsageError

        # Not an AttributeError: `from nbtrain import log` would turn that into "cannot import name".
        raise UsageError(
            f"nbtrain.{name} exists on the ranks only: use it (or import it) inside a %%distributed cell"
        ) from None
