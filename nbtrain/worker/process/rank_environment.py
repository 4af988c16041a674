"""Sets a rank's threads, variables and device, and applies the kernel's directory, path, environment and torch flags.

The latter are the notebook's: what a cell changed of them on a rank is put back before the next cell.
"""

from __future__ import annotations

import builtins
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import FileFinder
from typing import Any

import psutil

from nbtrain.base.installed_files import is_installed
from nbtrain.base.messages import KernelEnvironment
from nbtrain.base.specs import RankInfo
from nbtrain.compat import python, training_libraries
from nbtrain.worker.modules.local_modules import LocalModules
from nbtrain.worker.process import library_settings


def apply_environment(
    info: RankInfo, backend: str, environ: Mapping[str, str], run_id: str, address: str = "", master: str = "",
    shares_cards: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Replace the process's variables by the kernel's and the rank's own; returns the latter. To be called before torch
    computes anything, which fixes the number of threads. `run_id`: one for each pool. `address`, `master`: this
    machine's and rank 0's, where there are several. `shares_cards`: some of the ranks have a card together."""
    import torch

    torch.set_num_threads(info.threads)
    own = {"MPLBACKEND": os.environ["MPLBACKEND"]}
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update({**unless_set(info), **environ})
    own = {
        **own,
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.world_size // info.nodes),
        "GROUP_RANK": str(info.node),
        "GROUP_WORLD_SIZE": str(info.nodes),
        # What else torchrun sets. The kernel says `MASTER_PORT` before a cell; nobody listens there but the cell's own
        # code, for which the agent's store is switched off.
        "ROLE_RANK": str(info.rank),
        "ROLE_WORLD_SIZE": str(info.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master or "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # Else torch ends the process where another rank's has ended. Here the kernel ends what waits for that one.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "0",
        "OMP_NUM_THREADS": str(info.threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or _interface(address),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or _interface(address),
    }
    # NCCL refuses two ranks of one machine that have one card; so they say that they are on different ones.
    if shares_cards:
        own["NCCL_HOSTID"] = f"{run_id}-{info.rank}"
    if backend == "gloo":
        # torch would keep the stacks, and so the code, of the last 2000 collectives: megabytes that nobody reads.
        own["TORCH_FR_BUFFER_SIZE"] = os.environ.get("TORCH_FR_BUFFER_SIZE") or "0"
    os.environ.update(own)
    return own


def unless_set(info: RankInfo) -> dict[str, str]:
    """A rank's variables that hold where the notebook sets none of these names."""
    on_cpu = info.device == "cpu" and info.world_size > 1
    return {training_libraries.ON_CPU: "true"} if on_cpu else {}


def bind_device(info: RankInfo, directory: str) -> None:
    """Select the rank's device, and where temporary files go. `directory`: private to the user."""
    import torch

    # Loader workers' sockets: multiprocessing would leave a directory of its own behind whenever a rank is killed.
    python.put_sockets_into(directory)
    with suppress(FileNotFoundError):
        # Python tries places with a file, once. Torch would be the first to ask, just when a loader's worker has died,
        # and the signal of that death would interrupt it: the file would stay.
        tempfile.gettempdir()
    if info.device.startswith("cuda"):
        torch.cuda.set_device(info.device)
    elif info.device.startswith("xla"):
        from nbtrain.strategies.xla.library import take_place

        take_place(info)


def _interface(address: str) -> str:
    """The network that has this address, to which the group's connections keep."""
    for name, addresses in psutil.net_if_addrs().items() if address and not address.startswith("127.") else ():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return "lo" if sys.platform == "linux" else "lo0"


def torch_flags() -> dict[str, Any] | None:
    """The settings of torch that change what numbers come out; None where torch is not loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "backends"):
        return None
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn": torch.backends.cudnn.deterministic,
    }


class BuiltinsGuard:
    """Puts back what a cell replaces in the module `builtins`: everything on this rank uses it."""

    def __init__(self) -> None:
        self._before = dict(vars(builtins))

    def put_back(self) -> str | None:
        """Returns a sentence if the cell has replaced one."""
        now = vars(builtins)
        changed = [name for name, value in self._before.items() if now.get(name, self) is not value]
        if not changed:
            return None
        for name in changed:
            setattr(builtins, name, self._before[name])
        return (
            f"the cell replaced {', '.join(changed)} in the module builtins, which lasts until its end: a replacement "
            f"for other cells needs a name in the notebook, `{changed[0]} = …`"
        )


class NotebookEnvironment:
    """The notebook's environment as this rank was told it, applied before each cell."""

    def __init__(self, shell: Any, own: Mapping[str, str], unless_set: Mapping[str, str] | None = None) -> None:
        """`own`: variables that are the rank's and not the notebook's. `unless_set`: those that are the rank's where
        the notebook has none of that name."""
        self._shell = shell
        self._own = dict(own)
        self._unless_set = dict(unless_set or {})
        self._directory: str | None = None
        self._path: tuple[str, ...] | None = None
        self._environ: Mapping[str, str] | None = None
        self._flags: Mapping[str, Any] | None = None
        self._raw: Any = None
        self._modules = LocalModules()
        self._settings: dict[str, Any] = {}
        self._failed: dict[str, Exception] = {}
        """failures that were reported"""
        self._loaded: frozenset[str] = frozenset()
        library_settings.note_own_filters()

    def take(self, new: KernelEnvironment) -> list[str]:
        """Apply it before a cell; returns a sentence for each thing that failed."""
        self._directory = new.directory or self._directory
        self._path = new.path or self._path
        self._flags = new.torch_flags or self._flags
        if self._path is not None and tuple(sys.path) != self._path:
            sys.path[:] = self._path
        self._environment(new.environ, new.port)
        if new.colors is not None and new.colors != self._shell.colors:
            self._shell.colors = new.colors
        if self._flags is not None:
            _set_torch(self._flags)
        failed = self._unpack(new.settings or {})
        failed |= library_settings.put(self._settings)
        self._loaded = library_settings.LIBRARIES & sys.modules.keys()
        _look_again()
        stale = self._shell.packages.look(self._modules.as_read)
        return [
            *self._enter(),
            *self._unsaid(failed),
            *(change.sentence("the ranks still run", "%distributed restart") for change in stale),
        ]

    def settle(self) -> list[str]:
        """Apply settings of libraries that the parcel has imported."""
        late = library_settings.LIBRARIES - self._loaded
        if not late & sys.modules.keys():
            return []
        return self._unsaid(
            library_settings.put({name: value for name, value in self._settings.items() if name in late})
        )

    def _unpack(self, new: Mapping[str, bytes]) -> dict[str, Exception]:
        failed = {}
        for name, packed in new.items():
            self._settings.pop(name, None)
            self._failed.pop(name, None)
            try:
                self._settings[name] = pickle.loads(packed)
            except Exception as error:  # of a module that only the notebook has
                failed[name] = error
        return failed

    def _unsaid(self, failed: Mapping[str, Exception]) -> list[str]:
        """Sentences for failures that were not reported yet."""
        unsaid = [
            f"{name}: a rank cannot have the notebook's settings ({type(error).__name__}: {error}): set them in the "
            "%%distributed cell"
            for name, error in failed.items()
            if name not in self._failed
        ]
        self._failed |= failed
        return unsaid

    def refresh(self) -> tuple[list[str], list[str]]:
        """Reload changed local modules; returns them, and a sentence for each that is gone."""
        again, gone = self._modules.refresh(self._shell.user_ns)
        return again, [f"module {name!r} is gone from the disk; the ranks go on with what they loaded" for name in gone]

    def _enter(self) -> list[str]:
        if self._directory is None:
            return []
        try:
            if working_directory() != self._directory:
                os.chdir(self._directory)
        except OSError as error:
            return [f"a rank cannot enter {self._directory}: {error.strerror}"]
        return []

    def _environment(self, new: Mapping[str, str] | None, port: int | None) -> None:
        raw = python.raw_environment()
        if port is not None:
            self._own["MASTER_PORT"] = str(port)
        if new is None and port is None and (self._environ is None or raw == self._raw):
            return
        self._environ = new if new is not None else self._environ or {}
        here = {**self._unless_set, **self._environ, **self._own}
        for name in set(os.environ) - set(here):
            del os.environ[name]
        os.environ.update(here)
        self._raw = dict(raw or ())


_known: tuple[list[str], list[Any], list[FileFinder]] = [], [], []
"""sys.path and Python's finders at the last look, and those finders of them that list folders where people write"""


def _look_again() -> None:
    """Files may have been made since Python last listed its folders. `importlib.invalidate_caches` would also have it
    ask all other finders, and list the folders of installed packages anew: some three hundred with torch. Where pip
    installs something, Python sees it by the folder's time."""
    global _known
    folders = sys.path_importer_cache
    if sys.path != _known[0] or [*folders.values()] != _known[1]:
        local = [
            finder
            for folder, finder in list(folders.items())  # to know what is installed lists folders, too
            if isinstance(finder, FileFinder) and (folder in sys.path or not is_installed(os.path.join(folder, "")))
        ]
        for folder in [folder for folder, finder in folders.items() if finder is None]:  # it did not exist
            del folders[folder]
        _known = list(sys.path), [*folders.values()], local
    for finder in _known[2]:
        finder.invalidate_caches()


def working_directory() -> str | None:
    """None where it was deleted under this process."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _set_torch(flags: Mapping[str, Any]) -> None:
    now = torch_flags()
    if now == flags:
        return
    import torch

    torch.set_grad_enabled(flags["grad"])
    torch.set_default_dtype(getattr(torch, flags["dtype"]))
    if now is None or (now["deterministic"], now["warn_only"]) != (flags["deterministic"], flags["warn_only"]):
        # Setting it imports the compiler, which takes a second.
        torch.use_deterministic_algorithms(flags["deterministic"], warn_only=flags["warn_only"])
    torch.set_float32_matmul_precision(flags["matmul"])
    torch.backends.cudnn.benchmark = flags["benchmark"]
    torch.backends.cudnn.deterministic = flags["cudnn"]
