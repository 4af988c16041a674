"""A real Jupyter kernel to run cells in, as JupyterLab would.

    def test_something(kernel):
        shown = kernel.run("%load_ext nbtrain\\nprint(1)")
        assert shown.stdout == "1\\n"

`kernel` is fresh for each test; `shared_kernel` serves a whole module, its namespace emptied before each
test. `kernel_factory(**environment)` starts one with a special environment. When a kernel's fixture ends,
nothing that it started may live on for more than two seconds.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tests.support.hygiene import GRACE, describe, gone_within, marked
from tests.support.hygiene import KERNEL as MARK

ROOT = Path(__file__).resolve().parents[2]
VIEW = "application/vnd.jupyter.widget-view+json"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Error:
    """What a cell raised, without terminal colours."""

    ename: str
    evalue: str
    traceback: str


@dataclass(slots=True)
class Result:
    """What a cell has shown, in the order in which the notebook would show it."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    """Messages of the kernel: {"type": "stream" | "display_data" | ..., **content}."""
    updates: list[dict[str, Any]] = field(default_factory=list)
    """Bundles that replaced an earlier display (update_display)."""
    prompts: list[tuple[str, float]] = field(default_factory=list)
    """What was asked for in the input line, and when."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the page knows of each widget that this cell has opened; a closed one is gone."""
    widget_messages: int = 0
    done: bool = False

    @property
    def bars(self) -> list[tuple[float, float, str]]:
        """Progress bars on the page: value, maximum, style; from above."""
        shown = [data[VIEW]["model_id"] for data in self.displays if VIEW in data]
        for model in shown:  # boxes have their children behind a prefix
            shown += [one.removeprefix("IPY_MODEL_") for one in self.models.get(model, {}).get("children", ())]
        found = [self.models[model] for model in shown if "bar_style" in self.models.get(model, {})]
        return [(state["value"], state["max"], state["bar_style"]) for state in found]

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def displays(self) -> list[dict[str, Any]]:
        """The MIME bundles of display() and of the last expression, updated ones as they are now."""
        return [out["data"] for out in self.outputs if out["type"] in ("display_data", "execute_result")]

    @property
    def value(self) -> str | None:
        """The last expression, as text."""
        found = [out["data"].get("text/plain") for out in self.outputs if out["type"] == "execute_result"]
        return found[-1] if found else None

    @property
    def error(self) -> Error | None:
        for out in self.outputs:
            if out["type"] == "error":
                trace = _COLOURS.sub("", "\n".join(out["traceback"]))
                return Error(out["ename"], _COLOURS.sub("", out["evalue"]), trace)
        return None

    @property
    def text(self) -> str:
        """Everything a reader sees, as plain text."""
        parts = []
        for out in self.outputs:
            if out["type"] == "stream":
                parts.append(out["text"])
            elif out["type"] == "error":
                parts.append("\n".join(out["traceback"]) + "\n")
            else:
                parts.append(out["data"].get("text/plain", "") + "\n")
        return _COLOURS.sub("", "".join(parts))

    def asked(self, prompt: str) -> None:
        """The cell has asked for a line."""
        self.prompts.append((prompt, time.monotonic()))
        self.outputs.append({"type": "stream", "name": "stdin", "text": prompt})

    def typed(self, line: str) -> None:
        self.outputs.append({"type": "stream", "name": "stdin", "text": line + "\n"})

    def _stream(self, name: str) -> str:
        return "".join(out["text"] for out in self.outputs if out["type"] == "stream" and out["name"] == name)

    def _take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "clear_output":
            self.outputs.clear()
        elif kind == "update_display_data":
            self.updates.append(content["data"])
            self._replace(content)
        elif kind in ("stream", "display_data", "execute_result", "error"):
            self.outputs.append({"type": kind, **content})
        elif kind.startswith("comm_"):
            self.widget_messages += 1
            self._of_widget(kind, content["comm_id"], content.get("data", {}))

    def _of_widget(self, kind: str, model: str, data: dict[str, Any]) -> None:
        if kind == "comm_close":
            self.models.pop(model, None)
        elif kind == "comm_open" or model in self.models:
            self.models.setdefault(model, {}).update(data.get("state", {}))

    def _replace(self, content: dict[str, Any]) -> None:
        display_id = content.get("transient", {}).get("display_id")
        for out in self.outputs:
            if out.get("transient", {}).get("display_id") == display_id:
                out["data"] = content["data"]


class Kernel:
    """One kernel process and the connection to it."""

    def __init__(
        self, home: Path, environment: dict[str, str], within: Sequence[str] = (), python: str = sys.executable
    ) -> None:
        """`within`: the beginning of a command that becomes the kernel, such as `unshare -m`."""
        self.home = home
        self.mark = uuid.uuid4().hex
        self._results: dict[str, Result] = {}
        self._context = zmq.Context()
        self.manager = KernelManager(
            context=self._context,
            connection_file=str(home / f"kernel-{uuid.uuid4()}.json"),
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # this Python's own, whatever is installed
            **dict(zip(_PORTS, _free_ports(), strict=False)),
        )
        assert self.manager.kernel_spec is not None
        self.manager.kernel_spec.argv[:1] = [*within, python]
        self.manager.start_kernel(env=private_environment(home) | environment | {MARK: self.mark}, cwd=str(home))
        self._pid: int = self.manager.provisioner.pid  # type: ignore[union-attr]
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._pid

    def run(self, code: str, timeout: float = 60) -> Result:
        """Run a cell to its end. What it raised is in `.error`."""
        return self.wait(self.start(code), timeout)

    def start(self, code: str) -> Result:
        """Fire a cell; its result fills while `wait` or `wait_for` read what the kernel says."""
        result = self._results[self.client.execute(code, allow_stdin=False)] = Result()
        return result

    def type(self, code: str, *answers: str | Callable[[], object], timeout: float = 60) -> Result:
        """Run a cell to its end, and answer what it asks in the notebook's input line. A function is called in place of
        an answer. The cell must ask as often as there are answers."""
        result = self._results[self.client.execute(code, allow_stdin=True)] = Result()
        left = list(answers)
        while True:
            self.wait_for(lambda: result.done or self._asks(result), timeout)
            if result.done:
                assert not left, f"asked too seldom, {left} are left:\n{result.text}"
                return result
            assert left, f"asked once more than there are answers:\n{result.text}"
            answer = left.pop(0)
            if isinstance(answer, str):
                result.typed(answer)
                self.client.input(answer)
            else:
                answer()

    def _asks(self, result: Result) -> bool:
        try:
            message = self.client.get_stdin_msg(timeout=0.01)
        except Empty:
            return False
        result.asked(message["content"]["prompt"])
        return True

    def wait(self, result: Result, timeout: float = 60) -> Result:
        self.wait_for(lambda: result.done, timeout)
        return result

    def wait_for(self, condition: Callable[[], Any], timeout: float = 60) -> None:
        """Read messages until the condition holds; what was shown so far is in the error if it never does."""
        deadline = time.monotonic() + timeout
        while not condition():
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except Empty:
                if not self.manager.is_alive():
                    raise RuntimeError(f"the kernel died; shown so far:\n{self._shown()}") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not after {timeout} s; shown so far:\n{self._shown()}") from None
                continue
            self._dispatch(message)

    def interrupt(self) -> None:
        """The ■ button: SIGINT to the kernel's process group."""
        self.manager.interrupt_kernel()

    def complete(self, code: str, position: int | None = None, timeout: float = 20) -> list[str]:
        """What Tab offers at this position (default: at the end)."""
        reply = self.client.complete(code, len(code) if position is None else position, reply=True, timeout=timeout)
        return reply["content"]["matches"]

    def children(self) -> list[psutil.Process]:
        """Live processes that the kernel started, directly or not, orphans included."""
        return [p for p in marked(MARK, self.mark) if p.pid != self.pid]

    def kill(self) -> None:
        """SIGKILL the kernel alone, and return when it is gone: what a crash or the OOM killer does."""
        os.kill(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.manager.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self, grace: float = GRACE) -> list[str]:
        """Shut down as Jupyter does; returns what of the kernel is still alive after the grace."""
        self.client.stop_channels()
        with suppress(Exception):  # a killed kernel has nothing to be shut down
            self.manager.shutdown_kernel(now=not self.manager.is_alive())
        left = gone_within(grace, lambda: [describe(p) for p in marked(MARK, self.mark)])
        for process in marked(MARK, self.mark):
            process.kill()
        self._context.destroy(linger=0)
        return left

    def _dispatch(self, message: dict[str, Any]) -> None:
        result = self._results.get(message["parent_header"].get("msg_id"))
        if result is None:
            return
        if message["msg_type"] == "status":
            result.done = result.done or message["content"]["execution_state"] == "idle"
        else:
            result._take(message["msg_type"], message["content"])

    def _shown(self) -> str:
        return "\n---\n".join(result.text for result in self._results.values())


_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")
_next_port = itertools.count()


def _free_ports() -> Iterator[int]:
    """Ports for a kernel, from a range of this test process's own below those that the system gives away: of those,
    another process may have taken one before the kernel binds it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 12_000 + 1_000 * (worker % 20) + next(_next_port) % 1_000
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                yield port


def private_environment(home: Path) -> dict[str, str]:
    """The environment of a Jupyter that has never been used before and sees nobody's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "JPY_", "IPYTHON", "PYTEST"))}
    return kept | {
        "HOME": str(home),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '/usr/bin:/bin')}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@contextmanager
def private_home() -> Iterator[Path]:
    """A short directory, because a kernel's sockets are below it."""
    home = Path(tempfile.mkdtemp(prefix="home-"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def running_kernel(
    *within: str, python: str = sys.executable, grace: float = GRACE, **environment: str
) -> Iterator[Kernel]:
    with private_home() as home:
        kernel = Kernel(home, environment, within, python)
        try:
            yield kernel
        finally:
            left = kernel.close(grace)
    if left:
        pytest.fail(f"alive {grace:g} s after the kernel's end: {'; '.join(left)}", pytrace=False)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A fresh kernel, in a home directory of its own."""
    with running_kernel() as found:
        yield found


@pytest.fixture
def kernel_factory() -> Iterator[Callable[..., Kernel]]:
    """Kernels with a special environment: `kernel_factory(CUDA_VISIBLE_DEVICES="")`."""
    with ExitStack() as stack:
        yield lambda **environment: stack.enter_context(running_kernel(**environment))


@pytest.fixture(scope="module")
def module_kernel() -> Iterator[Kernel]:
    """The process behind `shared_kernel`."""
    with running_kernel() as found:
        yield found


@pytest.fixture
def shared_kernel(module_kernel: Kernel) -> Kernel:
    """One kernel for a whole module: a second saved per test, its namespace emptied before each."""
    module_kernel.run("%reset -f")
    return module_kernel
