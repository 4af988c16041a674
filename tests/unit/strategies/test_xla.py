"""`xla`: what can be known without torch_xla."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from nbtrain.base.errors import DeviceError, UsageError
from nbtrain.base.specs import PoolSpec, RankInfo
from nbtrain.machine import registry
from nbtrain.machine.devices import Devices, Machine, resolve
from nbtrain.machine.gpus import tpus
from nbtrain.machine.host import cores_allowed
from nbtrain.notebook.doctor import check_strategies
from nbtrain.notebook.magics import strategy_table
from nbtrain.strategies.xla.library import take_place
from tests.support.shells import Notebook, notebook

HERE = find_spec("torch_xla") is not None
EIGHT = Machine(cores=16, tpus=8)


@pytest.mark.parametrize(
    ("spec", "names", "chips"),
    [(8, 8, ()), (1, 1, ()), (-1, 8, ()), ("auto", 8, ()), ("free:1", 1, ()), ([3], 1, ("3",)), ("3", 1, ("3",))],
)
def test_a_number_of_cores_or_a_list_with_one(spec: object, names: int, chips: tuple[str, ...]) -> None:
    found = resolve(spec, accelerator="tpu", machine=EIGHT)  # type: ignore[arg-type]
    assert found == Devices(kind="tpu", names=("xla:0",) * names, uuids=chips)
    assert str(found) == "tpu"


@pytest.mark.parametrize(("spec", "machine", "says"), [
    (3, EIGHT, "there are 8 TPU cores; XLA takes 1 or all of them"),
    ([0, 1], EIGHT, "of TPU cores, a list names one, as in [0]; or write 8"),
    ([8], EIGHT, "there are 8 TPU cores, counted from 0"),
    (0, EIGHT, "means CPU, --accelerator tpu a TPU; leave one of them out"),
    (2, Machine(cores=4), "no TPU is visible on this machine; write --accelerator cpu or auto"),
])  # fmt: skip
def test_other_devices_are_refused_in_a_sentence(spec: object, machine: Machine, says: str) -> None:
    with pytest.raises(DeviceError, match="--") as refused:
        resolve(spec, accelerator="tpu", machine=machine)  # type: ignore[arg-type]
    assert says in str(refused.value)


def test_chips_are_counted_as_the_system_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    for name, vendor, device in (("0", "0x1ae0", "0x0063"), ("1", "0x1ae0", "0x0063"), ("2", "0x10de", "0x2330")):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    assert tpus(tmp_path) == 2
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert tpus() == cores_allowed()


def test_ranks_talk_to_each_other_beside_xla() -> None:
    assert PoolSpec(kind="tpu", devices=("xla:0", "xla:0")).backend == "gloo"


def test_the_table_and_the_doctor_say_what_it_was_not_run_on() -> None:
    (row,) = [row for row in strategy_table.strategies() if row[0] == "xla"]
    assert "not run on hardware" in row[2]
    assert HERE or "torch_xla is not installed: pip install torch_xla" in row[2]
    assert registry.strategy("xla").needs.kinds == ("tpu",)
    said = [f"{one.text} {one.instead}" for one in check_strategies(EIGHT)]
    wanted = "xla (not run on hardware)" if HERE else "xla needs torch_xla pip install torch_xla"
    assert any(wanted in line for line in said)


@pytest.mark.slow
def test_it_is_imported_without_torch_xla() -> None:
    code = "import sys, nbtrain.strategies.xla; assert 'torch_xla' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.skipif(HERE, reason="torch_xla is installed")
def test_a_rank_without_torch_xla_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(UsageError, match=r"torch_xla cannot be imported .*: pip install torch_xla"):
        take_place(RankInfo(rank=0, world_size=1, local_rank=0, device="xla:0", threads=1))


@pytest.fixture
def nb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with notebook() as found:
        yield found


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the name, which is all that is looked for before the ranks start."""
    if not HERE:
        (tmp_path / "torch_xla").mkdir()
        (tmp_path / "torch_xla" / "__init__.py").write_text("raise ImportError('the notebook must not import it')")
        monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("line", ["-s xla -d 1", "-s tpu -d 1", "--accelerator tpu -d 1", "-s xla -d 1 --start warm"])
def test_each_rank_is_an_interpreter_of_its_own(nb: Notebook, line: str) -> None:
    run = nb.spec(f"%%distributed {line}\npass")
    assert run.strategy == "xla"
    assert run.pool == PoolSpec(start="spawn", kind="tpu", devices=("xla:0",))


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(("line", "says"), [
    ("-s xla -d 1 --start fork", "--start fork: a process that was forked from the notebook's cannot have a TPU"),
    ("-s ddp --accelerator tpu -d 1", "--strategy ddp runs on cpu and cuda, and these devices are tpu"),
    ("-s xla --accelerator cpu -d 1", "--strategy xla runs on tpu, and these devices are cpu"),
    ("-s xla --engine inprocess -d 1", "--engine inprocess runs on cpu and cuda, and these devices are tpu"),
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(nb: Notebook, line: str, says: str) -> None:
    assert says in nb.complaint(f"%%distributed {line}\npass")
