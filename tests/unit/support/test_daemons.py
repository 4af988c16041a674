"""What daemons are started with, and that they end."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.support.daemons import daemons, free_ports, program


def test_a_daemon_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    with daemons(tmp_path) as started:
        started.start("early", "sh", "-c", "echo no such file >&2; exit 1")
        with pytest.raises(RuntimeError, match="early: no such file"):
            started.wait_until(lambda: False)


def test_one_that_never_answers_is_waited_for_no_longer_than_that(tmp_path: Path) -> None:
    with daemons(tmp_path) as started:
        started.start("silent", "sleep", "1000")
        with pytest.raises(RuntimeError, match=r"did not come up in 0\.2 s"):
            started.wait_until(lambda: False, timeout=0.2)


def test_what_it_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.daemons.GRACE", 0.5)
    with daemons(tmp_path) as started:
        orphan = "(setsid sh -c 'echo $$ > orphan; exec sleep 1000' &)"
        daemon = started.start("parent", "sh", "-c", f"trap '' TERM; {orphan}; sleep 1000 & echo $! > child; wait")
        files = [tmp_path / name for name in ("child", "orphan")]
        started.wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files))
        pids = [daemon.pid, *(int(file.read_text()) for file in files)]
        assert all(map(psutil.pid_exists, pids))
    assert daemon.returncode is not None
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []


def test_ports_are_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_REQUIRE_ALL", "0")
    with pytest.raises(pytest.skip.Exception, match=r"no such-a-program .apt-get install its-package"):
        program("such-a-program", "its-package")
    monkeypatch.setenv("NBTRAIN_REQUIRE_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match="no such-a-program"):
        program("such-a-program", "its-package")
    assert program(sys.executable, "python3") == sys.executable
