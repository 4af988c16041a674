"""Rules of the test house: nothing is left behind, nothing runs forever, what is left out is said.

Fixtures that start real things are in support/: kernels.py (a Jupyter kernel), lab.py (JupyterLab in a browser).
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import TextIO

import pytest
from jupyter_core.utils import ensure_event_loop

from tests.support.hygiene import OPS, Snapshot, drop_left_locks, mark_session
from tests.support.progress import Progress

pytest_plugins = ["tests.support.kernels", "tests.support.lab"]
pytest.register_assert_rewrite(
    "tests.fuzz",
    "tests.lines",
    "tests.support.bench",
    "tests.support.deepspeed",
    "tests.support.fsdp",
    "tests.support.loop_cases",
)

LIMIT = 120.0
"""Seconds for one test, fixtures included, unless it says `@pytest.mark.limit(seconds)`."""

LAST_RESORT = 60.0
"""Seconds after the limit at which a test that cannot even be interrupted ends the whole session."""

STARTERS = {"kernel": {"kernel", "module_kernel", "kernel_factory"}, "lab": {"lab"}}
"""mark → fixtures: who uses one of these starts a kernel, or JupyterLab in a browser"""

RANKS = {"run_on_ranks", "on_ranks", "Player", "Live", "Ranks"}
"""What a test file has imported whose tests start ranks."""

ROOMS = {"ranks": "ranks", "kernel": "kernel", "browser": "lab"}
"""folder → the mark of all that is in it; the rules above are for the folders that are named after something else"""

LONG = (
    "test_notebooks.py", "test_known_programs.py", "test_edits.py", "test_faults.py", "test_thawed.py", "test_wheel.py",
    "test_estimates.py", "test_by_hand.py", "test_environments.py", "test_deepspeed_edits.py", "test_parity.py",
    "test_deepspeed_loops.py", "test_sharded_memory.py", "test_lifecycle.py", "test_fuzz_training.py", "test_docs.py",
)  # fmt: skip
"""Files of a minute and more. They come first: of two workers (`-n 2 --dist loadfile`), none is left with one of them
when the other has nothing more to do."""

SECONDS = {"kernel": 5, "browser": 6, "faults": 3, "ranks": 3}
"""About how long one test takes that is `thorough`, by its folder; in the files above twice as long."""

_STDERR = pytest.StashKey[TextIO]()
_PRIVATE = pytest.StashKey[Path]()
_FROZEN = pytest.StashKey[int]()
"""how many modules there were when they were"""


class TookTooLong(Exception):
    """A test went on for longer than its limit; the stacks of all threads are above."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores SIGINT for what it starts in the background, and everything that the tests start would inherit it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A short path of our own: Unix sockets have about 100 characters, and what nbtrain leaves there is seen.
    private = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp" if Path("/tmp").is_dir() else None))
    config.stash[_PRIVATE] = private
    os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = str(private)
    os.environ["MPLCONFIGDIR"] = str(private / "matplotlib-config")
    os.environ["NBTRAIN_HISTORY"] = "off"  # the runs of tests are nobody's
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(OPS))
    drop_left_locks()
    tempfile.tempdir = None
    mark_session(of_its_own=hasattr(config, "workerinput"))
    # jupyter_client keeps one event loop a thread, with two sockets in it: there before the first test, it is no leak.
    ensure_event_loop()
    if getattr(config.option, "numprocesses", None) and not config.option.collectonly:
        config.pluginmanager.register(Progress(config))
    capture = config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        config.stash[_STDERR] = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    if (stream := config.stash.get(_STDERR, None)) is not None:
        stream.close()
    if (private := config.stash.get(_PRIVATE, None)) is not None:
        shutil.rmtree(private, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A time limit that raises in the test, and one that ends a session which does not even react to that."""
    marker = item.get_closest_marker("limit")
    limit = float(marker.args[0]) if marker else LIMIT
    stream = item.config.stash[_STDERR]

    def too_long(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=stream)
        raise TookTooLong(
            f"{item.nodeid} is not done after {limit:g} s (@pytest.mark.limit(seconds) sets another limit)"
        )

    old = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + LAST_RESORT, exit=True, file=stream)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.fixture(autouse=True)
def clean_house(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something behind. First in, last out: it sees the other fixtures' teardown too."""
    if request.node.get_closest_marker("gpu") and not request.node.get_closest_marker("kernel"):
        import torch

        torch.cuda.init()  # what it opens stays open
    before = Snapshot.take()
    yield
    torch = sys.modules.get("torch")
    modes = torch._C._len_torch_dispatch_stack() if torch is not None else 0
    if leaks := [*before.leaks(), *["a mode of torch's"] * modes]:
        before.restore()
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def frozen_heap(request: pytest.FixtureRequest) -> None:
    """Keeps what was imported out of collections, as ranks do: one takes a quarter of a second otherwise, and tests and
    ranks' shutdowns ask for thousands. `@pytest.mark.whole_heap`: for tests that look for holders among all objects."""
    wanted = request.node.get_closest_marker("whole_heap") is None
    frozen = request.config.stash.get(_FROZEN, 0)  # `gc.get_freeze_count()` walks through all that is frozen
    if wanted and len(sys.modules) > frozen + 9:
        gc.collect()
        gc.freeze()
        request.config.stash[_FROZEN] = len(sys.modules)
    elif not wanted and frozen:
        gc.unfreeze()
        request.config.stash[_FROZEN] = 0


@pytest.fixture(autouse=True, scope="session")
def clean_session() -> Iterator[None]:
    """The same for processes of fixtures that outlive a test."""
    before = Snapshot.take()
    yield
    if leaks := [line for line in before.leaks() if line.startswith(("process", "file"))]:
        before.restore()
        pytest.fail("left behind at the end: " + "; ".join(leaks), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks that follow from what a test uses, those of `sample`, and what takes long first (tests/README.md)."""
    played: Counter[str] = Counter()
    for item in items:
        if marker := item.get_closest_marker("sample"):
            table = item.nodeid.partition("[")[0]
            if not _is_sampled(item, marker, played[table]):
                item.add_marker("thorough")
            played[table] += 1
        used = set(getattr(item, "fixturenames", ()))
        for name, fixtures in STARTERS.items():
            if not used.isdisjoint(fixtures):
                item.add_marker(name)
        if not RANKS.isdisjoint(vars(getattr(item, "module", None) or object)):
            item.add_marker("ranks")
        if (room := item.path.parent.name) in ROOMS:
            item.add_marker(ROOMS[room])
    long = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: long.get(item.path.name, len(long)))
    if part := os.environ.get("PART"):
        items[:] = _without_other_parts(items, *map(int, part.split("/")))
    _leave_out_gpu(items)


def _without_other_parts(items: list[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
    """`PART=2/8`: all that `make test` plays, and of what is thorough the second eighth. Tests of one file share what
    they start, so a file stays in one part; the longest is dealt first, each to the part that has least."""
    takes: Counter[Path] = Counter()
    for item in items:
        if item.get_closest_marker("thorough"):
            takes[item.path] += SECONDS.get(item.path.parent.name, 1) * (2 if item.path.name in LONG else 1)
    loads, others = [0] * parts, set()
    for path in sorted(takes, key=lambda path: (-takes[path], path)):
        least = loads.index(min(loads))
        loads[least] += takes[path]
        if least + 1 != part:
            others.add(path)
    return [item for item in items if not (item.path in others and item.get_closest_marker("thorough"))]


def _is_sampled(item: pytest.Item, marker: pytest.Mark, at: int) -> bool:
    """`sample("ddp", "fsdp-*")`: the rows with these ids; `sample(first=3)`: so many."""
    row = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return at < marker.kwargs.get("first", 0) or any(fnmatchcase(row, name) for name in marker.args)


def _leave_out_gpu(items: list[pytest.Item]) -> None:
    """GPU tests are left out where there is no GPU, and torch is asked only if there are any."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason for which tests were left out; pytest's own closing line comes after it."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"left out: {count} test{'s' * (count > 1)}: {reason}")


if sys.platform == "win32":
    raise RuntimeError("the tests use Unix signals and sockets; run them on Linux or macOS, or inside WSL")
