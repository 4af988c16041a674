"""A package that has changed under nbtrain: a sentence, and never a rank that dies."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

GONE = """
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
del FSDPState._lazy_init
"""
FAILS = """
from nbtrain.worker.runtime import Runtime
def end(runtime, ok):
    Runtime.end = plain
    raise AttributeError("'FSDPParam' object has no attribute '_gone'")
plain, Runtime.end = Runtime.end, end
"""


@pytest.mark.kernel
def test_a_strategy_that_does_not_fit_is_refused_and_others_go_on(kernel: Kernel) -> None:
    notebook = Notebook(kernel)
    notebook(TRAIN)
    notebook(f"%%distributed -s none --devices 2\n{GONE}")
    for _ in range(2):
        told = notebook.kernel.run(f"%%distributed -s fsdp --devices 2\n{LOOP}").text
        assert "Traceback" not in told
        assert "fsdp does not fit torch" in told
        assert "FSDPState has no _lazy_init" in told
        assert "Write --strategy ddp, or install one that was: pip install" in told
        assert "exit code" not in told
    notebook("before = [p.detach().clone() for p in model.parameters()]")
    notebook(f"%%distributed -s ddp --devices 2\n{LOOP}")
    notebook("assert not all(map(torch.equal, before, model.parameters()))")


@pytest.mark.thorough
@pytest.mark.kernel
def test_the_table_of_strategies_says_it_too(kernel: Kernel) -> None:
    notebook = Notebook(kernel)
    assert "does not fit" not in notebook("%distributed strategies").text
    notebook(GONE)
    line, *presets = [one for one in notebook("%distributed strategies").text.splitlines() if "does not fit" in one]
    assert line.split()[0] == "fsdp"
    assert all(preset.startswith("fsdp_") for preset in presets)
    doctor = notebook("%distributed doctor").text
    assert "! strategies  fsdp does not fit torch" in doctor
    assert "Write --strategy ddp, or install one that was: pip install" in " ".join(doctor.split())
    assert "no: fsdp does not fit torch" in line


@pytest.mark.thorough
@pytest.mark.kernel
def test_a_rank_lives_on_when_the_end_of_a_cell_fails(kernel: Kernel) -> None:
    notebook = Notebook(kernel)
    notebook(TRAIN)
    notebook(f"%%distributed -s ddp --devices 2\nimport os, sys; sys.then = os.getpid()\n{FAILS}\nRuntime.end = plain")
    error = notebook.fails(f"%%distributed -s ddp --devices 2\n{FAILS}\n{LOOP}")
    assert "has no attribute '_gone'" in error.traceback
    assert "exit code" not in error.traceback
    notebook("%%distributed -s ddp --devices 2\nimport os, sys; assert os.getpid() == sys.then")
    notebook("before = [p.detach().clone() for p in model.parameters()]")
    notebook(f"%%distributed -s ddp --devices 2\n{LOOP}")
    notebook("assert not all(map(torch.equal, before, model.parameters()))")
