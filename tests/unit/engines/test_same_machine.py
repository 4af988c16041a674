"""Who finds the same content at the same place is on the same machine; nobody else."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nbtrain.engines.remote.same_machine import APART, Proof, own_proof

ELSEWHERE = (
    "import sys, pickle; from nbtrain.engines.remote.same_machine import own_proof\n"
    "sys.stdout.buffer.write(pickle.dumps(own_proof())); sys.stdout.flush(); sys.stdin.read()"
)


def test_a_process_of_this_machine_and_one_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ELSEWHERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        proof = pickle.load(process.stdout)
        assert proof.holds_here()
        assert not replace(proof, content=b"x" * 32).holds_here()
        process.stdin.close()
    assert not proof.holds_here()


def test_what_is_there_by_chance_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"x" * 32 + b"more")
    assert not Proof(str(there), b"x" * 32).holds_here()
    assert not Proof(str(tmp_path / "none"), b"x" * 32).holds_here()
    assert not Proof().holds_here()
    monkeypatch.setenv(APART, "1")
    assert own_proof() == Proof()
