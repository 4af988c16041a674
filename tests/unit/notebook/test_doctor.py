"""What is possible here: findings from readings, versions from files, CUDA's first use seen in a real shell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from nbtrain.machine import cuda_watch, devices, gpus, host
from nbtrain.machine.cuda_watch import CudaWatch, Origin
from nbtrain.notebook import doctor
from nbtrain.notebook.doctor import ReportLine
from tests.support.shells import bare_shell

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


@pytest.mark.parametrize(
    ("torch", "nvcc", "level"),
    [("12.8", "12.4", "ok"), ("12.8", "13.0", "warn"), ("12.8", None, "note"), (None, "13.0", "note")],
)
def test_the_compiler_against_torch(torch: str | None, nvcc: str | None, level: str) -> None:
    (found,) = doctor.check_compiler(torch, nvcc)
    assert found.level == level


def test_nvcc_is_asked_and_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, release in (("home/bin", "12.8"), ("path", "11.8")):
        nvcc = tmp_path / place / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.93"\n')
        nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert doctor.nvcc_version() == "11.8"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert doctor.nvcc_version() == "12.8"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert doctor.nvcc_version() is None


@pytest.mark.parametrize(
    ("line", "version"), [("cuda: Optional[str] = '12.8'", "12.8"), ("cuda = None", None), ("cuda = '13.0'", "13.0")]
)
def test_torchs_cuda_is_read_from_its_file(tmp_path: Path, line: str, version: str | None) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.9.0'\ndebug = False\n{line}\nhip = None\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from nbtrain.notebook.doctor import torch_cuda\n"
        "print(torch_cuda())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(version)


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


# ---------------------------------------------------------------- which cell woke CUDA

WAKE = "torch.cuda._queued_calls[-1][0]()"
"""What `torch.cuda._lazy_init` does with what was queued, for a torch that has no CUDA to initialise."""


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    queued = list(torch.cuda._queued_calls)
    with bare_shell() as shell:
        shell.user_ns["torch"] = torch
        yield shell
    assert torch.cuda._queued_calls == queued, "what was queued in torch is taken out again"


@pytest.fixture
def watch(shell: InteractiveShell) -> Iterator[CudaWatch]:
    watch = CudaWatch(shell)
    yield watch
    watch.close()


def run(shell: InteractiveShell, cell: str) -> int:
    """The number of the cell that was run."""
    result = shell.run_cell(cell, store_history=True)
    result.raise_error()
    number: int = result.execution_count
    return number


def test_the_cell_and_the_line_are_named(shell: InteractiveShell, watch: CudaWatch) -> None:
    run(shell, "def to_gpu():\n    return " + WAKE)
    run(shell, "x = 1")
    assert watch.origin is None
    number = run(shell, "y = 2\nto_gpu()\n")
    assert watch.origin == Origin(cell=number, line=2, source="to_gpu()")
    assert str(watch.origin) == f"cell [{number}], line 2: `to_gpu()`"
    run(shell, WAKE)
    assert watch.origin == Origin(cell=number, line=2, source="to_gpu()"), "the first time counts"


def test_the_report_within_the_very_cell_knows_the_line(shell: InteractiveShell, watch: CudaWatch) -> None:
    shell.user_ns["watch"] = watch
    run(shell, WAKE + "\ntold = str(watch.origin)")
    assert shell.user_ns["told"] == f"a cell, line 1: `{WAKE}`"


def test_the_library_that_did_it_is_named_too(shell: InteractiveShell, watch: CudaWatch, tmp_path: Path) -> None:
    (tmp_path / "wakes_cuda.py").write_text(f"import torch\n\n{WAKE}\n")
    run(shell, f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    try:
        number = run(shell, "x = 1\nimport wakes_cuda")
    finally:
        run(shell, f"sys.path.remove({str(tmp_path)!r}); sys.modules.pop('wakes_cuda')")
    library = str(tmp_path / "wakes_cuda.py")
    assert watch.origin == Origin(cell=number, line=2, source="import wakes_cuda", through=f"{library}:3")


def test_cuda_that_torch_did_not_wake_is_pinned_to_its_cell(shell: InteractiveShell) -> None:
    awake: list[str] = []
    shell.user_ns["awake"] = awake
    watch = CudaWatch(shell, initialised=lambda: awake[0] if awake else None)
    try:
        run(shell, "1")
        assert watch.origin is None
        number = run(shell, "awake.append('the CUDA driver')")
        run(shell, "2")
        assert watch.origin == Origin(cell=number)
        text = said(doctor.check_cuda("the CUDA driver", watch.origin, watched=True))
        assert f"initialised in this process by the CUDA driver, by cell [{number}]" in text
    finally:
        watch.close()


def test_what_happened_before_is_said_to_be_unknown(shell: InteractiveShell) -> None:
    watch = CudaWatch(shell, initialised=lambda: "torch")
    try:
        assert watch.too_late
        run(shell, "1")
        assert watch.origin is None
        assert "before nbtrain was loaded" in said(doctor.check_cuda("torch", None, watched=not watch.too_late))
    finally:
        watch.close()


def test_the_report_asks_the_watch_of_this_kernel(shell: InteractiveShell) -> None:
    before = {name: list(functions) for name, functions in shell.events.callbacks.items()}
    stop = cuda_watch.watch_cuda_init(shell)
    number = run(shell, WAKE)
    (last,) = cuda_watch._WATCH
    assert last.origin.cell == number
    stop()
    stop()
    assert cuda_watch._WATCH == []
    assert shell.events.callbacks == before


@pytest.mark.slow
def test_torch_imported_later_is_watched_through_its_own_initialisation() -> None:
    """torch's own `_lazy_init`, given a CUDA library that has nothing to do."""
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "import sys; from nbtrain.machine.cuda_watch import CudaWatch\n"
        "shell = InteractiveShell(); watch = CudaWatch(shell)\n"
        "assert 'torch' not in sys.modules\n"
        "def run(cell): return shell.run_cell(cell, store_history=True).raise_error()\n"
        "run('import torch')\n"
        "run('torch._C._cuda_getDeviceCount = torch._C._cuda_init = lambda: 0; torch.cuda._cudart = torch')\n"
        "assert watch.origin is None\n"
        "run('x = 1\\ntorch.cuda.init()')\n"
        "assert sys.modules['torch'].cuda.is_initialized()\n"
        "print(watch.origin)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cell [3], line 2: `torch.cuda.init()`"
