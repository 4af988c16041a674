"""DeepSpeed's compiled ops: built once per machine and version, by one rank while the others wait, wherever DeepSpeed
asks for one. What takes time is said; compilers end with the rank that started them; locks of the dead are broken."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat.extensions import LOCK, RUN_NINJA
from nbtrain.errors import NbtrainError, UsageError
from nbtrain.intercept import listening
from nbtrain.strategies.deepspeed import build_guard
from nbtrain.strategies.deepspeed.quiet import quiet, say

SECONDS = {"cpu_adam": 40, "fused_adam": 60, "async_io": 85}
"""what it takes on two cores"""
BUILDERS = ("CPUAdamBuilder", "AsyncIOBuilder")
"""what nbtrain asks for by itself"""
EVERY = 10.0
"""seconds between two lines that say how long it has taken"""


def load(deepspeed: Any, builder: str) -> Any:
    """The op, compiled if it has to be."""
    make: Any = deepspeed.accelerator.get_accelerator().create_op_builder(builder)
    if make is None:
        raise UsageError(f"DeepSpeed has no {builder.removesuffix('Builder')} for this kind of device")
    with quiet():
        return make.load(verbose=False)


def announced(old: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of DeepSpeed's own loading of an op that was not installed with it."""

    def jit_load(make: Any, verbose: bool = True) -> Any:
        progress = CompileProgress(make.name)
        _without_debugging(make)
        with _tools() as folder:
            if not (folder / make.name / f"{make.name}.so").exists():
                _check_compiler(make)
                about = f", about {SECONDS[make.name]} s" if make.name in SECONDS else ""
                progress.say(f"compiling DeepSpeed's {make.name}, once per machine{about}")
            return _load(make, old, folder, progress)

    return jit_load


def _load(make: Any, old: Callable[..., Any], folder: Path, progress: CompileProgress) -> Any:
    with _alone(folder / "nbtrain.wait", progress):
        _wait_for_lock(folder / make.name / LOCK, progress)
        try:
            with listening(RUN_NINJA, "deepspeed", lambda _: progress.compile):
                return old(make, verbose=False)
        except NbtrainError:
            raise
        except Exception as error:
            raise UsageError(_failed(make.name, error)) from error


class CompileProgress:
    """Shows how far one op is compiled. Rank 0 shows it, whichever rank compiles."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = self.last = time.monotonic()
        self.speaks = not dist.is_initialized() or dist.get_rank() == 0

    def say(self, text: str) -> None:
        if self.speaks:
            say(text)

    def tell(self) -> None:
        """Called again and again: says how long it has taken, once in `EVERY` seconds."""
        now = time.monotonic()
        if now - self.last >= EVERY:
            self.last = now
            self.say(f"compiling DeepSpeed's {self.name}: {now - self.began:.0f} s")

    def compile(self, build_directory: str, verbose: bool, error_prefix: str) -> None:
        """As torch does, but that the compilers end when this process does."""
        jobs = os.environ.get("MAX_JOBS", "")
        command = ["ninja", "-v", *(["-j", jobs] if jobs.isdigit() else [])]
        guarded = [sys.executable, "-I", "-S", build_guard.__file__, *command]
        output = b""
        with subprocess.Popen(
            guarded, cwd=build_directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                while True:
                    if not select.select([process.stdout], [], [], 1.0)[0]:
                        self.tell()
                        continue
                    more = os.read(process.stdout.fileno(), 1 << 16)
                    if not more:
                        break
                    output += more
                process.wait()
            finally:
                process.stdin.close()
        if process.returncode:
            raise RuntimeError(f"{error_prefix}: {output.decode(errors='replace')}")


def _without_debugging(make: Any) -> None:
    """What debuggers want to know of torch's headers takes the compiler a third of its time."""
    given = make.cxx_args
    make.cxx_args = lambda: [one for one in given() if one != "-g"]


def _failed(name: str, error: BaseException) -> str:
    text = str(error).strip()
    last = text.splitlines()[-1] if text else type(error).__name__
    return (
        f"DeepSpeed's {name} could not be compiled ({last}). It needs a C++ compiler (apt install g++), "
        "ninja (pip install ninja) and the headers of this Python"
    )


def _check_compiler(make: Any) -> None:
    if shutil.which("ninja") is None:
        raise UsageError(f"DeepSpeed's {make.name} has to be compiled, and there is no ninja: pip install ninja")
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        raise UsageError(f"DeepSpeed's {make.name} has to be compiled, and there is no C++ compiler: apt install g++")
    if make.name == "async_io":
        with quiet():
            possible = make.is_compatible(verbose=False)
        if not possible:
            raise UsageError("offloading to nvme needs libaio: apt install libaio-dev (dnf install libaio-devel)")


@contextlib.contextmanager
def _tools() -> Iterator[Path]:
    """A private folder that lasts, and the ninja that was installed with this Python."""
    before = {name: os.environ.get(name) for name in ("TORCH_EXTENSIONS_DIR", "PATH")}
    if not before["TORCH_EXTENSIONS_DIR"]:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        which = f"{version('deepspeed')}-torch-{torch.__version__}-py{sys.version_info[0]}{sys.version_info[1]}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache / "nbtrain" / f"deepspeed-{which}")
    beside = os.path.dirname(sys.executable)
    if shutil.which("ninja") is None and os.path.exists(os.path.join(beside, "ninja")):
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
    try:
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise UsageError(f"the folder for DeepSpeed's compiled ops: {error}") from None
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _alone(path: Path, progress: CompileProgress) -> Iterator[None]:
    """One rank at a time; the lock goes with the process that holds it."""
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
                progress.tell()
        yield


def _wait_for_lock(lock: Path, progress: CompileProgress) -> None:
    """torch would wait forever for a compilation that was killed. Nobody has the file open any more then."""
    while lock.exists():
        if not _is_open(lock):
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.2)
        progress.tell()


def _is_open(file: Path) -> bool:
    """Some process has it; of other users' processes that cannot be seen."""
    wanted = os.path.realpath(file)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(one) == wanted for one in (process / "fd").iterdir()):
                return True
    return False
