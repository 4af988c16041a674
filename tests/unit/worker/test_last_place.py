"""Where another thread is, read while that thread goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

READER = """
    import gc, threading
    from nbtrain.compat.python import frames_of

    go, inside = threading.Event(), threading.Event()

    def leaf():
        inside.set()
        go.wait()

    def middle(): leaf()
    def outer(): middle()

    class Waits:
        "Its finalizer lets the other thread leave all its calls."
        def __init__(self): self.itself = self
        def __del__(self):
            go.set()
            other.join()

    other = threading.Thread(target=outer)
    other.start()
    inside.wait()
    gc.set_threshold(0)
    Waits()
    frames = frames_of(other.ident)
    calls = [next(frames).f_code.co_name]
    gc.set_threshold(1)
    for frame in frames:
        calls.append(frame.f_code.co_name)
    gc.set_threshold(0)
    print([name for name in calls if name in ("leaf", "middle", "outer")], gc.isenabled())
    go.set()
"""


def test_a_finalizer_that_waits_for_the_other_thread() -> None:
    """It is not run while frames are read: Python 3.11 would crash."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READER)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "['leaf', 'middle', 'outer'] True\n"), done.stderr
