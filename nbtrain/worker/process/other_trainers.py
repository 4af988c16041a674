"""Refuses training libraries that distribute by themselves where the strategy does so already.

Under a strategy that distributes, their batches would be shared out and their gradients averaged a second time. Under
`none` they are right, if they are made on the ranks: what was made in the notebook knows of one process, and would
train alone on each rank. So would what is made on the ranks and finds one process, as accelerate does without a GPU
where nobody tells it of the CPU. Processes that a cell starts for its training are not the ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RankInfo
from nbtrain.compat import training_libraries
from nbtrain.compat.horovod import START
from nbtrain.compat.intercept import Listeners
from nbtrain.compat.training_libraries import ON_CPU, SETTINGS, SETTINGS_ON_CPU, STATE, ProcessAware
from nbtrain.machine import registry

TWICE = (
    "{what} distributes the training by itself, and so does -s {strategy}: batches would be shared out and gradients "
    "averaged twice. Write %%distributed -s none above this cell{instead}"
)
ELSEWHERE = (
    "{what} was made where there is one process, in the notebook, and knows of no other: each rank would train by "
    "itself. Make it in the cell, below %%distributed -s none"
)
ALONE = (
    "{what} finds one process where there are {count}, and each rank would train by itself: without a GPU they are "
    "counted only where the CPU is asked for. Write {instead}{variable}"
)
BY_HOROVOD = (
    "{what}: under -s {strategy} Horovod does not connect the ranks, and each would train by itself. Write "
    "%%distributed -s horovod; it averages the gradients, so hvd.DistributedOptimizer is not needed"
)
HOROVOD_TWICE = (
    "hvd.DistributedOptimizer: -s horovod averages the gradients of every optimizer already. Leave it out, and step "
    "with the optimizer itself"
)
PROCESSES = (
    "{what} starts processes of its own, and the ranks are there already. Write %%distributed -s none -d {count} above "
    "the cell, and in its place {call}"
)
LAUNCHERS = tuple(f"{training_libraries.LAUNCHERS}.{name}" for name in ("notebook_launcher", "debug_launcher"))
SPAWN = "torch.multiprocessing.start_processes"


class OtherTrainers:
    """One rank's checks. `listen` once; `begin` and `end` around the user's code."""

    def __init__(self, info: RankInfo) -> None:
        self.info = info
        self._strategy = ""
        """the running cell's; empty between cells"""
        self._hands_off = False
        self._here: WeakSet[Any] = WeakSet()
        """objects of these libraries that were made on this rank"""
        self._listeners = Listeners()
        self._wrappers: list[tuple[Any, dict[str, Any]]] = []
        """(weak reference to a model, what accelerate has put into it), while no cell runs"""

    def listen(self) -> None:
        on = self._listeners
        for trainer in training_libraries.CLASSES:
            makes = {f"{trainer.path}.__init__": partial(self._made, trainer)}
            makes.update({f"{trainer.path}.{name}": partial(self._used, trainer) for name in trainer.uses})
            on.when_imported(trainer.module, list(makes), "brought", makes.__getitem__)
        for cls, name, count in ((SETTINGS, "__post_init__", self._set), (STATE, "__init__", self._count)):
            path = f"{cls}.{name}"
            on.when_imported(cls.rpartition(".")[0], [path], "brought", {path: count}.__getitem__)
        on.when_imported("deepspeed", [training_libraries.DEEPSPEED], "brought", lambda _: self._initialize)
        on.when_imported("horovod.torch", [training_libraries.HOROVOD], "brought", lambda _: self._optimizer)
        on.when_imported("horovod.torch", [START], "brought", lambda _: self._init)
        on.when_imported(training_libraries.LAUNCHERS, LAUNCHERS, "brought", self._launcher)
        on.listen(SPAWN, "brought", self._processes)

    def close(self) -> None:
        self._listeners.close()

    def begin(self, strategy: str, hands_off: bool) -> None:
        """A cell is about to run."""
        self._strategy, self._hands_off = strategy, hands_off
        wrappers, self._wrappers = self._wrappers, []
        for model, wrapper in wrappers:
            if model() is not None:
                vars(model()).update(wrapper)

    def end(self, models: Callable[[], Iterable[Any]]) -> None:
        """`models`: whose own forward comes home, and not what a library has put in its place for the ranks."""
        self._strategy = ""
        for model in models() if "accelerate" in sys.modules else ():
            if (wrapper := training_libraries.take_wrapper(model)) is not None:
                self._wrappers.append((ref(model), wrapper))

    @property
    def _several(self) -> bool:
        return bool(self._strategy) and self.info.world_size > 1

    # -- what is called in a cell -----------------------------------------------------------------

    def _made(self, trainer: ProcessAware, old: Callable[..., Any]) -> Callable[..., Any]:
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            self._refuse_twice(trainer.word)
            if trainer.takes and self._several:
                self._check_settings(trainer, [*args, *kwargs.values()])
            self._here.add(made)
            old(made, *args, **kwargs)
            if trainer.on_cpu:
                self._check_count(trainer.word, training_libraries.processes_of_accelerator(made), trainer.on_cpu)

        return init

    def _set(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """Settings are made, and count."""

        def post_init(made: Any, *args: Any, **kwargs: Any) -> None:
            old(made, *args, **kwargs)
            self._check_count(type(made).__name__, training_libraries.processes(made), SETTINGS_ON_CPU)

        return post_init

    def _count(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """Processes are counted."""

        def init(state: Any, cpu: bool = False, **kwargs: Any) -> None:
            told = self._several and self.info.device == "cpu" and training_libraries.told_of_cpu(os.environ)
            old(state, cpu or told, **kwargs)

        return init

    def _used(self, trainer: ProcessAware, old: Callable[..., Any]) -> Callable[..., Any]:
        def use(made: Any, *args: Any, **kwargs: Any) -> Any:
            self._refuse_twice(trainer.word)
            if self._several and made not in self._here:
                raise NotSupported(ELSEWHERE.format(what=trainer.word) + trainer.instead)
            return old(made, *args, **kwargs)

        return use

    def _initialize(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(*args: Any, **kwargs: Any) -> Any:
            self._refuse_twice("deepspeed.initialize", ", or leave it out and write -s deepspeed")
            return old(*args, **kwargs)

        return initialize

    def _by_horovod(self) -> bool:
        entry = registry.find_strategy(self._strategy)
        return entry is not None and "horovod" in entry.needs.packages

    def _optimizer(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def optimizer(*args: Any, **kwargs: Any) -> Any:
            if self._several:
                alone = BY_HOROVOD.format(what="hvd.DistributedOptimizer", strategy=self._strategy)
                raise NotSupported(HOROVOD_TWICE if self._by_horovod() else alone)
            return old(*args, **kwargs)

        return optimizer

    def _init(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def init(*args: Any, **kwargs: Any) -> Any:
            if self._several and not self._by_horovod():
                raise NotSupported(BY_HOROVOD.format(what="hvd.init()", strategy=self._strategy))
            return old(*args, **kwargs)

        return init

    def _launcher(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        name = path.rpartition(".")[2]

        def make(old: Callable[..., Any]) -> Callable[..., Any]:
            def launch(function: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._strategy:
                    return old(function, *args, **kwargs)
                count = kwargs.get("num_processes") or (args[1] if len(args) > 1 else None) or self.info.world_size
                given = "" if not (args or kwargs.get("args")) else "*args"
                raise NotSupported(_processes(name, function, count, given))

            return launch

        return make

    def _processes(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def start(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **kwargs: Any) -> Any:
            given = "rank, *args" if args else "rank"
            if self._strategy and (self.info.world_size > 1 or nprocs > 1):
                raise NotSupported(_processes("torch.multiprocessing.spawn", fn, nprocs, given))
            return old(fn, args, nprocs, *more, **kwargs)

        return start

    def _check_settings(self, trainer: ProcessAware, given: list[Any]) -> None:
        """Refuse settings that were made for another number of processes."""
        for settings in given:
            of = {cls.__name__ for cls in type(settings).__mro__}
            if trainer.takes in of and training_libraries.processes(settings) != self.info.world_size:
                raise NotSupported(ELSEWHERE.format(what=f"the {trainer.takes} of {trainer.word}"))

    def _check_count(self, what: str, processes: int | None, instead: str) -> None:
        """Refuse what was made on this rank and has counted one process."""
        if self._several and processes == 1:
            told = os.environ.get(ON_CPU)
            denied = told and not training_libraries.told_of_cpu(os.environ)
            variable = f", or leave {ON_CPU}={told} out" if denied else ""
            raise NotSupported(ALONE.format(what=what, count=self.info.world_size, instead=instead, variable=variable))

    def _refuse_twice(self, what: str, instead: str = "") -> None:
        if self._several and not self._hands_off:
            raise NotSupported(TWICE.format(what=what, strategy=self._strategy, instead=instead))


def _processes(what: str, function: Any, count: Any, given: str) -> str:
    call = f"{getattr(function, '__name__', 'function')}({given})"
    return PROCESSES.format(what=what, count=count, call=call)
