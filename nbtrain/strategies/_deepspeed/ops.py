"""DeepSpeed's compiled ops, built ahead: once per machine and version, by one rank while the others wait, and said
before it begins. Left alone, DeepSpeed compiles inside of the first step, or of `initialize`, and says nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nbtrain.errors import UsageError
from nbtrain.strategies._deepspeed.library import quiet

SECONDS = {"CPUAdamBuilder": 40, "AsyncIOBuilder": 85}
NAMES = {"CPUAdamBuilder": "CPU Adam", "AsyncIOBuilder": "asynchronous reader and writer of files"}


def load(deepspeed: Any, builder: str, first: bool) -> Any:
    """The op, compiled if it has to be. `first`: this rank says so."""
    with _tools(deepspeed):
        make: Any = deepspeed.accelerator.get_accelerator().create_op_builder(builder)
        if make is None:
            raise UsageError(f"DeepSpeed has no {NAMES[builder]} for this kind of device")
        _without_debugging(make)
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        with _alone(folder / "nbtrain.wait"):
            built = folder / make.name / f"{make.name}.so"
            if not built.exists():
                if first:
                    print(
                        f"compiling DeepSpeed's {NAMES[builder]}, once per machine: about {SECONDS[builder]} s",
                        flush=True,
                    )
                _check_compiler(builder, make)
            for lock in folder.glob("*/lock"):  # torch would wait for ever for a compilation that was killed
                lock.unlink(missing_ok=True)
            try:
                with quiet():
                    return make.load(verbose=False)
            except Exception as error:
                raise UsageError(_failed(builder, error)) from error


def _without_debugging(make: Any) -> None:
    """What debuggers want to know of torch's headers takes the compiler a third of its time."""
    given = make.cxx_args
    make.cxx_args = lambda: [one for one in given() if one != "-g"]


def _failed(builder: str, error: BaseException) -> str:
    text = str(error).strip()
    last = text.splitlines()[-1] if text else type(error).__name__
    return (
        f"DeepSpeed's {NAMES[builder]} could not be compiled ({last}). It needs a C++ compiler (apt install g++), "
        "ninja (pip install ninja) and the headers of this Python"
    )


def _check_compiler(builder: str, make: Any) -> None:
    if shutil.which("ninja") is None:
        raise UsageError(f"DeepSpeed's {NAMES[builder]} has to be compiled, and there is no ninja: pip install ninja")
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        raise UsageError(
            f"DeepSpeed's {NAMES[builder]} has to be compiled, and there is no C++ compiler: apt install g++"
        )
    if builder == "AsyncIOBuilder":
        with quiet():
            possible = make.is_compatible(verbose=False)
        if not possible:
            raise UsageError("offloading to nvme needs libaio: apt install libaio-dev (dnf install libaio-devel)")


@contextlib.contextmanager
def _tools(deepspeed: Any) -> Iterator[None]:
    """A private folder that lasts, and the ninja that was installed with this Python."""
    before = {name: os.environ.get(name) for name in ("TORCH_EXTENSIONS_DIR", "PATH")}
    if not before["TORCH_EXTENSIONS_DIR"]:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        version = f"{deepspeed.__version__}-torch-{torch.__version__}-py{sys.version_info[0]}{sys.version_info[1]}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache / "nbtrain" / f"deepspeed-{version}")
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and os.path.exists(os.path.join(beside, "ninja")):
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
    try:
        os.makedirs(os.environ["TORCH_EXTENSIONS_DIR"], mode=0o700, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(f"the folder for DeepSpeed's compiled ops: {error}") from None
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One rank at a time; the lock goes with the process that holds it."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
