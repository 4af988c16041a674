"""Says of objects that cannot go to another process why, and what to write instead. One table, read top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbtrain.compat import training_libraries, type_names


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to say of some types."""

    types: tuple[str, ...]
    """`module.Class`, the class itself or one it is derived from"""
    reason: str
    instead: str


IN_THE_CELL = "make it inside the cell"
GENERAL = "make it inside the cell, or give its class a __getstate__ that leaves out what cannot travel"
OF_A_BAR = "a progress bar draws where it was made"

TABLE = (
    Remedy(type_names.LOCKS,
           "a lock belongs to the process that made it", "make it inside the cell, or leave it out in __getstate__"),
    Remedy(type_names.THREADS,
           "threads, and what waits for them, stay in the process that started them", "start it inside the cell"),
    Remedy(type_names.SHARED_WITH_CHILDREN,
           "it is shared with the children of the process that made it only", "make it inside the cell"),
    Remedy(
        type_names.MODELS_IN_PIECES,
        "its weights are in pieces, bound to the ranks' process group",
        "leave it there and save its state; or write --strategy fsdp or deepspeed, and train the plain model",
    ),
    Remedy(type_names.TENSORS_IN_PIECES,
           "it is one rank's piece of a tensor", "take .full_tensor() of it, on all ranks"),
    Remedy(type_names.PER_THREAD, "each thread has its own", IN_THE_CELL),
    Remedy(type_names.QUEUES,
           "a queue joins threads of one process", "send list(queue.queue), or make the queue inside the cell"),
    Remedy(("subprocess.Popen",), "a subprocess belongs to the process that started it", "start it inside the cell"),
    Remedy(("socket.socket", "ssl.SSLContext", "http.client.HTTPConnection"),
           "a connection belongs to the process that opened it", "open it inside the cell"),
    Remedy(("zmq.sugar.context.Context", "zmq.sugar.socket.Socket", "zmq.sugar.poll.Poller"),
           "ZeroMQ's sockets belong to the process that opened them", "open it inside the cell"),
    Remedy(
        type_names.DATABASES,
        "a database connection belongs to the process that opened it",
        "connect inside the cell, or send the rows it gave",
    ),
    Remedy(type_names.OPEN_FILES,
           "an open file belongs to the process that opened it", "send the file's name and open it inside the cell"),
    Remedy(type_names.OPEN_ARCHIVES,
           "an open file belongs to the process that opened it", "send dict(...) of it, or load it inside the cell"),
    Remedy(type_names.CSV,
           "it reads or writes an open file", "make it inside the cell, from the file's name"),
    Remedy(("logging.FileHandler",), "it writes to an open file", "add the handler inside the cell"),
    Remedy(
        type_names.LOADER_ITERATORS,
        "a running iterator has its place, and perhaps workers, in the process that started it",
        "send the loader and write iter(loader) inside the cell",
    ),
    Remedy(("tqdm.std.tqdm", "rich.progress.Progress", "rich.live.Live"),
           OF_A_BAR, "make it inside the cell: for batch in tqdm(loader)"),
    Remedy(
        ("torch.utils.tensorboard.writer.SummaryWriter", "tensorboardX.writer.SummaryWriter",
         "wandb.sdk.wandb_run.Run"),
        "it writes files from threads of its own",
        "make it inside the cell, under `if rank == 0`; or use log(loss=loss)",
    ),
    Remedy(
        ("ipywidgets.widgets.widget.Widget", "comm.base_comm.BaseComm"),
        "a widget's view lives in the notebook, and would not move with the copy",
        "send its .value, and show progress with log(...)",
    ),
    Remedy(
        type_names.EVENT_LOOPS,
        "an event loop, and what waits in it, belongs to one thread",
        "make it inside the cell; top-level await works there",
    ),
    Remedy(type_names.CONTEXT_VARIABLES,
           "a context variable is known to its process only", IN_THE_CELL),
    Remedy(("weakref.ProxyType", "weakref.CallableProxyType", "weakref.WeakMethod"),
           "it stands for an object that it does not hold", "send the object itself"),
    Remedy(("builtins.memoryview",), "it is a window on another object's memory, and would arrive as a copy",
           "send that object, or bytes(...) of it"),
    Remedy(("mmap.mmap",), "mapped memory belongs to the process that mapped it",
           "map the file inside the cell; np.memmap travels by its file's name"),
    Remedy(("numpy.memmap",), "", "send the whole map and slice it inside the cell"),
    Remedy(type_names.ADDRESSES,
           "it holds an address of this process", "load the library, or fill the structure, inside the cell"),
    Remedy(type_names.SCRIPTED,
           "a scripted module is compiled code", "send the plain module and call torch.jit.script inside the cell"),
    Remedy(("builtins.generator", "builtins.async_generator"), "a running generator holds a frame",
           "make it inside the cell, or send list(...) of it"),
    Remedy(("builtins.coroutine",), "a coroutine holds a frame", "call the async function inside the cell"),
    Remedy(("nbtrain.exchange.kinds.base.Handle",), "", "run the cell that made it again"),
    Remedy(("builtins.frame", "builtins.traceback"), "a frame is alive in its process only",
           "send traceback.format_exc() instead"),
)  # fmt: skip

OF_ALL_RANKS = (
    Remedy(training_libraries.TRAINERS, "", "trainer.state.log_history, trainer.model, what evaluate() returns"),
    Remedy(training_libraries.TRAINER_SETTINGS, "", "args.to_dict(); or make it anew in the notebook"),
    Remedy(training_libraries.PREPARED, "", "accelerator.unwrap_model(model), accelerator.get_state_dict(model)"),
    Remedy(training_libraries.AVERAGED, "", "its .module, the model itself"),
)
"""Of objects that were made where there are several processes, and have counted them: what of them comes home."""
COUNTED = "it works with all {count} ranks, and would be wrong without them. Return or name what you want of it: {what}"
_OF_ALL_RANKS = {name: remedy for remedy in OF_ALL_RANKS for name in remedy.types}

_BY_NAME = {name: remedy for remedy in TABLE for name in remedy.types}

OURS = ("nbtrain.worker.", "nbtrain.notebook.", "nbtrain.engines.", "nbtrain.notebook.magics.", "nbtrain.worker.")
_OURS = Remedy((), "it is a part of nbtrain that is running", "leave it out of what the cell reads")

_SAYS_HOW = ("__reduce__", "__reduce_ex__", "__getstate__")


def remedy_for(cls: Any) -> Remedy | None:
    """What to say of a class; None when a class of the user's says how it is pickled, or nothing is known."""
    if cls.__module__.startswith(OURS):
        return _OURS
    for base in cls.__mro__:
        remedy = _BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if remedy is not None:
            return remedy
        if base.__module__ not in ("abc", "builtins") and any(name in vars(base) for name in _SAYS_HOW):
            # Such a class may well leave out what cannot travel. Libraries that refuse do it in the class itself.
            return None
    return None


def counts_processes(cls: Any) -> Remedy | None:
    """What to say of a class whose objects look how many processes there are when they are made."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return next((_OF_ALL_RANKS[name] for name in names if name in _OF_ALL_RANKS), None)


def bound_to_ranks(obj: Any) -> str | None:
    """Why an object stays with the ranks that it has counted; None: it has not."""
    remedy = counts_processes(type(obj))
    if remedy is None or (count := training_libraries.processes_joined()) == 1:
        return None
    return COUNTED.format(count=count, what=remedy.instead)


def known_reason(cls: Any) -> str | None:
    remedy = remedy_for(cls)
    return remedy.reason or None if remedy is not None else None


def instead(obj: Any) -> str:
    cls: Any = type(obj)
    remedy = remedy_for(cls)
    return remedy.instead if remedy is not None else GENERAL
