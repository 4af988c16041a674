"""What is read from a rank's file descriptors is said once, and before the rank says that it has come to the end."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from nbtrain.base.events import Event, Output
from nbtrain.worker.shell import output


class Slow:
    """Megabytes: between looking how much there is and having read it, the other thread looks, too."""

    def __init__(self, fd: int, stream: str, path: str, taken: memoryview[int]) -> None:
        self.stream = stream
        self.reading = threading.Event()
        self._unread = "y" * 1000 if stream == "stdout" else ""

    def read(self) -> str:
        text = self._unread
        self.reading.set()
        time.sleep(0.2)
        self._unread = ""
        return text


def test_two_threads_that_read_do_not_say_it_twice_nor_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # put back afterwards
    monkeypatch.setattr(output, "Drain", Slow)
    sent: list[Event] = []
    outputs = output.Outputs(0, sent.append, ("", ""), (memoryview(b""), memoryview(b"")))
    meters = threading.Thread(target=outputs.drain)
    meters.start()
    outputs._drains[0].reading.wait()
    outputs.finish()
    said = "".join(event.text for event in sent if isinstance(event, Output))
    meters.join()
    assert said == "y" * 1000
    outputs.outlet.flush()
    assert "".join(event.text for event in sent if isinstance(event, Output)) == "y" * 1000
