"""Runs a function of Lightning's Trainer on the ranks, as a cell; what it changed comes home like that of any cell: the
module, callbacks, loops and metrics of the notebook's own Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbtrain.annexes.frameworks.functions.run_cell import errors_in_short, notebook, outlives, run_cell
from nbtrain.annexes.frameworks.lightning.loaders import Dealing
from nbtrain.annexes.frameworks.lightning.progress import in_the_dashboard
from nbtrain.base.errors import UsageError
from nbtrain.compat import kernel, lightning

NAME = "lightning_work"
"""in the notebook's namespace"""


class Stopped(BaseException):
    """The user has pressed Stop. Not a KeyboardInterrupt: at one Lightning ends the whole process."""


class Work:
    """One call of a Trainer's function, as the ranks are sent it."""

    def __init__(self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.trainer = trainer
        own = trainer is not None and getattr(function, "__self__", None) is trainer
        self.function: Any = function.__name__ if own else function
        self.args, self.kwargs = args, kwargs
        self.result: Any = None

    def run(self) -> None:
        """On each rank."""
        function = getattr(self.trainer, self.function) if isinstance(self.function, str) else self.function
        if self.trainer is None:
            self.result = function(*self.args, **self.kwargs)
            return
        try:
            with lightning.own_samplers(self.trainer), in_the_dashboard(self.trainer), Dealing(self.trainer) as dealing:
                self.result = dealing.whole(function(*self.args, **self.kwargs))
        except lightning.tuning_ended(self.trainer):
            lightning.end_tuning(self.trainer)
        except BaseException:
            lightning.tear_down(self.trainer)
            raise
        finally:
            lightning.drop_own(self.trainer)


class OnWarmRanks:
    """What Lightning calls a launcher. It starts nothing: the ranks are there, or the cell starts them."""

    is_interactive_compatible = True

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        work = Work(trainer, function, args, kwargs)
        shell, line, asked = notebook(), self._line(), lightning.asked_for(function)
        text = f"{NAME}.run()  # Trainer.{asked}"
        try:
            with errors_in_short():
                if outlives(line):
                    if asked != "fit":
                        raise UsageError(f"{asked} returns what it has computed: leave --detach out for it")
                    text = f"{_names_of(trainer, shell.user_ns)}\n{text}"
                run_cell(shell, line, text, {NAME: work})
        except KeyboardInterrupt as stop:
            stopped = Stopped(str(stop))
            kernel.show_as(stopped, [f"KeyboardInterrupt: {stop}" if str(stop) else "KeyboardInterrupt"])
            raise stopped from None
        finally:
            if trainer is not None:
                _attach(trainer)
        result, work.result = work.result, None
        return result

    def kill(self, signum: Any) -> None:
        """Ranks are ended by `%distributed stop`."""

    def _line(self) -> str:
        devices, nodes = self.strategy.parallel_devices, self.strategy.num_nodes
        line = f"--strategy {self.strategy.runs}" + (f" --nodes {nodes}" if nodes > 1 else "")
        if devices[0].type == "cpu":
            return f"{line} --accelerator cpu --devices {len(devices)}"
        return f"{line} --accelerator gpu --devices {','.join(str(device.index) for device in devices)}"


def _names_of(trainer: Any, namespace: Mapping[str, Any]) -> str:
    """By which the notebook knows what comes home later: the trainer, its module and callbacks."""
    parts = (trainer, trainer.lightning_module, *trainer.callbacks)
    return ", ".join(name for name, value in namespace.items() if name[0] != "_" and any(value is p for p in parts))


def _attach(trainer: Any) -> None:
    """A module, or a data module, leaves its trainer behind when it travels."""
    for part in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        if part is not None:
            part.trainer = trainer
