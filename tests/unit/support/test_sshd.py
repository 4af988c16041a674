"""A real sshd: its commands, their environment, and that nothing of them is left."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.hygiene import SESSION
from tests.support.sshd import NAMES, NODE, running_sshd


def test_both_names_are_reached_and_ask_for_nothing(tmp_path: Path) -> None:
    with running_sshd(tmp_path) as sshd:
        assert [sshd.run(name, f"echo ${NODE}").strip() for name in NAMES] == [*NAMES]
        by_config = ["ssh", "-F", str(sshd.config), "node-a", "exit 3"]
        by_path = ["ssh", "node-b", "cat; exit 4"]
        assert subprocess.run(by_config, stdin=subprocess.DEVNULL).returncode == 3
        done = subprocess.run(by_path, env=os.environ | sshd.environment, input=b"typed", capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (4, b"typed", b"")


def test_a_login_has_what_it_was_given_and_not_what_the_test_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "here")
    with running_sshd(tmp_path, GIVEN='two "words" and a \\') as sshd:
        told = sshd.run("node-a", f'echo "$GIVEN;$OF_THE_TEST;${SESSION};$TMPDIR"')
        assert told.strip().split(";") == ['two "words" and a \\', "", os.environ[SESSION], os.environ["TMPDIR"]]


def test_no_other_host_is_looked_for(tmp_path: Path) -> None:
    with running_sshd(tmp_path) as sshd, pytest.raises(AssertionError, match="Connection closed"):
        sshd.run("node-c", "true")


def test_what_runs_over_it_ends_with_it(tmp_path: Path) -> None:
    """The hygiene of tests sees to it that neither is left."""
    with running_sshd(tmp_path) as sshd:
        sshd.run("node-a", "setsid nohup sleep 1000 >/dev/null 2>&1 </dev/null &")
        line = ["ssh", "node-b", "echo started; exec sleep 1000"]
        environment = os.environ | sshd.environment
        client = subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert client.stdout
        with client.stdout:
            assert client.stdout.readline() == b"started\n"
    assert client.wait(5) == 255
