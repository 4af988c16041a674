"""The rules of the house catch what they are for: each kind of leak, by name, and each kind of hang."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import hygiene
from tests.support.hygiene import Snapshot

ROOT = Path(__file__).resolve().parents[3]


def process() -> Iterator[None]:
    process = subprocess.Popen(["sleep", "600"])
    yield
    process.kill()
    process.wait()


def thread() -> Iterator[None]:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    yield
    release.set()
    thread.join()


def file() -> Iterator[None]:
    with tempfile.NamedTemporaryFile(prefix="forgotten"):  # which is open, too
        yield


def handler() -> Iterator[None]:
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize("what", [process, thread, file, handler])
def test_a_leak_is_named(what: Callable[[], Iterator[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hygiene, "GRACE", 0.1)
    before = Snapshot.take()
    with contextmanager(what)():
        leaks = before.leaks()
    assert any(leak.startswith(what.__name__) for leak in leaks)
    assert all(leak.startswith((what.__name__, "open file")) for leak in leaks)
    assert before.leaks() == []


def inner_session(directory: Path, test: str, *within: str) -> subprocess.CompletedProcess[str]:
    """A test session of its own, under this house's rules; `within` is the beginning of a command that becomes it."""
    (directory / "test_inner.py").write_text(test)
    command = [*within, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={directory}", str(directory / "test_inner.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_leaking_test_fails_alone(tmp_path: Path) -> None:
    told = inner_session(
        tmp_path,
        "import os\n"
        "def test_leaks(): os.environ['FORGOTTEN'] = '1'\n"
        "def test_is_clean(): assert 'FORGOTTEN' not in os.environ\n",
    )
    assert "left behind: environment variable FORGOTTEN: None → '1'" in told.stdout
    assert "2 passed, 1 error" in told.stdout


@pytest.mark.slow
def test_a_hanging_test_fails_with_the_stack_and_the_session_goes_on(tmp_path: Path) -> None:
    told = inner_session(
        tmp_path,
        "import pytest, threading\n"
        "@pytest.mark.limit(1.5)\n"  # on a busy machine it takes a while to come there
        "def test_hangs(): threading.Event().wait()\n"
        "def test_next(): pass\n",
    )
    assert "is not done after 1.5 s" in told.stdout
    assert "in test_hangs" in told.stderr
    assert "1 failed, 1 passed" in told.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("required", "ending"), [("0", "1 skipped"), ("1", "1 failed")])
def test_what_is_absent_is_left_out_by_name_or_fails_on_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, ending: str
) -> None:
    monkeypatch.setenv("NBTRAIN_REQUIRE_ALL", required)
    told = inner_session(
        tmp_path,
        "from tests.support.absent import absent\ndef test_page(): absent('no Chromium', 'install chromium')\n",
    )
    assert ending in told.stdout.splitlines()[-1]
    assert ("left out: 1 test: no Chromium (install chromium)" in told.stdout) == (required == "0")
