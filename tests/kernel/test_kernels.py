"""The harness itself: what the other tests rely on when they drive a real kernel."""

import os
from collections.abc import Callable

import psutil
import pytest

from tests.support.hygiene import alive
from tests.support.kernels import Kernel, running_kernel

pytestmark = pytest.mark.kernel


def test_a_cell_shows_what_it_prints_displays_and_returns(shared_kernel: Kernel) -> None:
    shown = shared_kernel.run(
        "import sys; from IPython.display import display\nprint('out'); print('err', file=sys.stderr)\n"
        "handle = display({'text/plain': 'first'}, raw=True, display_id=True)\n"
        "handle.update({'text/plain': 'second'}, raw=True)\n6 * 7"
    )
    assert (shown.stdout, shown.stderr, shown.value) == ("out\n", "err\n", "42")
    assert shown.displays[0] == {"text/plain": "second"}
    assert shown.error is None


def test_an_error_has_name_text_and_a_plain_traceback(shared_kernel: Kernel) -> None:
    error = shared_kernel.run("x = 1\n1 / 0").error
    assert error is not None
    assert (error.ename, error.evalue) == ("ZeroDivisionError", "division by zero")
    assert "1 / 0" in error.traceback
    assert "\x1b" not in error.traceback


def test_the_namespace_of_a_shared_kernel_is_empty(shared_kernel: Kernel) -> None:
    assert shared_kernel.run("x").error is not None, "x of the test before is still there"


def test_a_running_cell_can_be_watched_and_interrupted(shared_kernel: Kernel) -> None:
    cell = shared_kernel.start("import time\nprint('started')\ntime.sleep(600)")
    shared_kernel.wait_for(lambda: "started" in cell.stdout)
    shared_kernel.interrupt()
    error = shared_kernel.wait(cell, timeout=10).error
    assert error is not None
    assert error.ename == "KeyboardInterrupt"
    assert shared_kernel.run("1 + 1").value == "2"


def test_completion(shared_kernel: Kernel) -> None:
    shared_kernel.run("an_unusual_name = 1")
    assert shared_kernel.complete("an_unus") == ["an_unusual_name"]


def test_a_kernel_has_nobody_elses_settings(shared_kernel: Kernel) -> None:
    shown = shared_kernel.run("import os; print(os.environ['HOME'], os.environ['IPYTHONDIR'])").stdout
    assert all(path.startswith(str(shared_kernel.home)) for path in shown.split())
    assert os.environ["HOME"] not in shown.split()


def test_children_are_seen_also_when_they_are_orphans(kernel_factory: Callable[..., Kernel]) -> None:
    kernel = kernel_factory(SOME_SETTING="yes")
    sleeper = "import subprocess, os; p = subprocess.Popen(['sleep', '600'], start_new_session=True); p.pid"
    shown = kernel.run(sleeper)
    assert kernel.run("os.environ['SOME_SETTING']").value == "'yes'"
    kernel.kill()
    assert [child.pid for child in kernel.children()] == [int(shown.value)]
    psutil.Process(int(shown.value)).kill()


def test_what_outlives_its_kernel_fails_the_test_and_is_ended() -> None:
    with (
        pytest.raises(pytest.fail.Exception, match="alive 2 s after the kernel's end: ") as failure,
        running_kernel() as kernel,
    ):
        kernel.run("import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True)")
        (child,) = kernel.children()
    assert str(child.pid) in str(failure.value)
    assert not alive(child)


def test_a_dead_kernel_is_reported_with_what_it_had_shown(kernel: Kernel) -> None:
    with pytest.raises(RuntimeError, match=r"the kernel died(.|\n)*last words"):
        kernel.run("import os, sys; print('last words'); sys.stdout.flush(); import time; time.sleep(.2); os._exit(1)")
