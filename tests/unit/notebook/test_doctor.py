"""What is possible here: findings from readings, versions from files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from nbtrain.machine import devices, gpus, host
from nbtrain.notebook import doctor
from nbtrain.notebook.doctor import ReportLine

GIB = 2**30


def said(findings: Iterator[ReportLine]) -> str:
    return doctor.report(findings)


# ---------------------------------------------------------------- the report


def test_from_a_terminal_without_loading_torch() -> None:
    code = (
        "import sys; from nbtrain.__main__ import main; status = main(['doctor'])\n"
        "print('loaded', sorted({'torch', 'numpy', 'IPython'} & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    *report, last = done.stdout.splitlines()
    assert last == "loaded [] 0"
    topics = ["here", "versions", "cores", "memory", "GPUs", "CUDA", "--start", "strategies"]
    assert [topic for topic in topics if not any(line[2:].startswith(topic) for line in report)] == []
    assert done.stderr == ""


def test_help_and_wrong_words_from_a_terminal() -> None:
    command = [sys.executable, "-m", "nbtrain"]
    assert "doctor" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wrong = subprocess.run([*command, "nurse"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "nurse" in wrong.stderr
    assert "doctor" in wrong.stderr


def test_what_does_not_work_is_counted_and_says_what_to_do() -> None:
    text = doctor.report([ReportLine("bad", "a", "is missing", "pip install a"), ReportLine("ok", "longer", "fine")])
    assert text.splitlines()[:3] == ["✗ a       is missing", "          → pip install a", "  longer  fine"]
    assert "1 × ✗" in text
    assert doctor.report([ReportLine("ok", "a", "b")]).endswith("nothing stands in the way")


# ---------------------------------------------------------------- one by one


@pytest.mark.parametrize(("versions", "level", "says"), [
    ({"torch": "2.8.0+cu126"}, "ok", "torch 2.8.0+cu126"),
    ({"torch": "2.10.0"}, "ok", "torch 2.10.0"),
    ({"torch": "2.7.1"}, "bad", "older than 2.8"),
    ({"torch": None}, "bad", "torch is not installed"),
    ({"ipykernel": "7.0.1"}, "warn", "ipykernel 7.0.1 loses what threads print"),
    ({"ipykernel": "7.1.0"}, "ok", "ipykernel 7.1.0"),
    ({"ipykernel": "6.17"}, "ok", "ipykernel 6.17"),
    ({"nbtrain": None}, "note", "source folder"),
])  # fmt: skip
def test_versions(versions: dict[str, str | None], level: str, says: str) -> None:
    (found,) = doctor.check_versions(versions)
    assert found.level == level
    assert says in found.text
    assert bool(found.instead) == (level in ("bad", "warn"))


@pytest.mark.parametrize(("signs", "says"), [
    ({"COLAB_RELEASE_TAG": "release"}, "leave ipython and ipykernel"),
    ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "--monitor text"),
    ({"DATABRICKS_RUNTIME_VERSION": "16"}, "not tried here"),
])  # fmt: skip
def test_what_is_to_be_known_of_a_place(signs: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in signs.items():
        monkeypatch.setenv(name, value)
    found = [one for one in doctor.diagnose(machine=devices.Machine(cores=2), versions={}) if one.topic == "here"]
    assert [one.level for one in found] == ["ok", "note"]
    assert says in found[1].text


def test_limits_of_the_container_are_told_from_the_machine() -> None:
    memory = host.HostMemory(host=64 * GIB, limit=4 * GIB, available=3 * GIB)
    text = said(doctor.check_host(1, memory, host.Space(total=64 * 2**20, free=64 * 2**20)))
    assert "3.22 GB free; the machine has 68.7 GB, the cgroup allows 4.29 GB of them" in text
    assert "67.1 MB free: enough for nbtrain" in text
    assert "num_workers=0" in text


def test_cards_and_who_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    users = (gpus.GpuUser(pid=7), gpus.GpuUser(pid=8))
    cards = (
        gpus.Gpu(index=0, uuid="GPU-a", name="T4", total=16 * GIB),
        gpus.Gpu(index=1, uuid="GPU-b", name="H100", total=80 * GIB, used=2 * GIB, users=users),
    )
    text = said(doctor.check_gpus(devices.Machine(cores=2, gpus=cards, visible="1", mine=frozenset([8])), None))
    assert "cuda:0 H100, 2.15 GB of 85.9 GB used, used by process 7, process 8 (this notebook)" in text
    assert "CUDA_VISIBLE_DEVICES='1' shows 1 of 2 GPUs" in text
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in text
    assert "T4" not in text


def test_a_driver_that_does_not_answer_is_not_the_same_as_no_driver() -> None:
    machine = devices.Machine(cores=2)
    (broken,) = doctor.check_gpus(machine, "NVML: Driver/library version mismatch (error 18)")
    assert (broken.level, "version mismatch" in broken.text) == ("warn", True)
    (none,) = doctor.check_gpus(machine, "libnvidia-ml.so.1: cannot open shared object file")
    assert none.level == "ok"


def test_cuda_in_the_kernel() -> None:
    assert "not initialised" in said(doctor.check_cuda(None))
    woken = said(doctor.check_cuda("torch"))
    assert "by torch" in woken
    assert "keep the model on the CPU" in woken


def test_start_methods() -> None:
    assert "so is fork" in said(doctor.check_starts(None, "linux"))
    refused = said(doctor.check_starts("`--start fork` is not possible: CUDA", "linux"))
    assert "warm and spawn are possible\n" in refused
    assert "CUDA" in refused
    assert "spawn only" in said(doctor.check_starts("not here", "darwin"))


def test_strategies_are_all_named() -> None:
    text = said(doctor.check_strategies(devices.Machine(cores=2)))
    assert "available: " in text
    assert [name for name in doctor.registry.strategies() if name not in text] == []
