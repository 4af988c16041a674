"""Which devices the ranks get. Tables of cards are data; leases are held by real processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nbtrain.base.errors import DeviceError
from nbtrain.machine.devices import Devices, Machine, here, resolve, threads_per_rank
from nbtrain.machine.gpus import Gpu, GpuUser
from nbtrain.machine.leases import Lease

GIB = 2**30


def cards(count: int, users: dict[int, tuple[int, ...]] | None = None, used: dict[int, int] | None = None) -> Any:
    return tuple(
        Gpu(
            index=index, uuid=f"GPU-{index}aaaa", name="H100", total=80 * GIB, used=(used or {}).get(index, 0),
            users=tuple(GpuUser(pid=pid, memory=GIB) for pid in (users or {}).get(index, ())),
        )
        for index in range(count)
    )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(cores=8, gpus=cards(4), leases=tmp_path)


CPU = Machine(cores=8)
WORDS = ["", "two", "1;2", "-2", "0,-1", "1.5", "free:0", "free:", "free:-1", "[1", "1]", "cuda:0", "1,,2", "٣"]


@pytest.mark.parametrize(("spec", "quoted", "names"), [
    (None, True, ["cpu"]),
    ("None", False, ["cpu"]),
    (0, True, ["cpu"]),
    ("0", False, ["cpu"]),
    ([], True, ["cpu"]),
    ("[]", False, ["cpu"]),
    (3, True, ["cuda:0", "cuda:1", "cuda:2"]),
    ("3", False, ["cuda:0", "cuda:1", "cuda:2"]),
    (-1, True, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ("-1", True, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ("-1", False, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ([0], True, ["cuda:0"]),
    ("[0]", False, ["cuda:0"]),
    ([1, 3], True, ["cuda:1", "cuda:3"]),
    ((3, 1), True, ["cuda:3", "cuda:1"]),
    ("0", True, ["cuda:0"]),
    ("3", True, ["cuda:3"]),
    ("1, 3", True, ["cuda:1", "cuda:3"]),
    ("1,3", False, ["cuda:1", "cuda:3"]),
    ("1,", False, ["cuda:1"]),
    ("auto", False, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ("free:2", False, ["cuda:0", "cuda:1"]),
])  # fmt: skip
def test_the_table(machine: Machine, spec: Any, quoted: bool, names: list[str]) -> None:
    devices = resolve(spec, quoted=quoted, machine=machine)
    assert list(devices.names) == names
    assert devices.kind == names[0].split(":")[0]
    assert len(devices.uuids) == (0 if devices.kind == "cpu" else len(names))


@pytest.mark.parametrize(("spec", "ranks"), [(None, 1), (0, 1), (3, 3), ("auto", 4), ("free:2", 2), ([], 1)], ids=repr)
def test_without_gpus_an_integer_is_a_number_of_cpu_ranks(spec: Any, ranks: int) -> None:
    assert resolve(spec, machine=CPU) == Devices(kind="cpu", names=("cpu",) * ranks)
    assert resolve(spec, accelerator="cpu", machine=Machine(cores=8, gpus=cards(4))).names == ("cpu",) * ranks


def test_auto_takes_no_more_cpu_ranks_than_cores() -> None:
    assert resolve("auto", machine=Machine(cores=2)).names == ("cpu", "cpu")


@pytest.mark.parametrize("spec", [*WORDS, -2, 1.5, True, [0, -1], ["0"], [True], {"a": 1}, b"1"], ids=repr)
@pytest.mark.parametrize("quoted", [True, False])
def test_nonsense_is_quoted_in_one_line_that_says_what_is_valid(machine: Machine, spec: Any, quoted: bool) -> None:
    with pytest.raises(DeviceError) as caught:
        resolve(spec, quoted=quoted, machine=machine)
    said = str(caught.value)
    assert f"--devices {spec!r}" in said if quoted else f"--devices {spec}" in said
    assert "0 or None (CPU)" in said
    assert "\n" not in said


@pytest.mark.parametrize(("spec", "options", "says"), [
    (5, {}, "asks for 5 GPUs and there are 4 GPUs; .*--oversubscribe"),
    ("4", {}, "there is no GPU 4; there are: 0, 1, 2, 3"),
    ([0, 9], {"oversubscribe": True}, "there is no GPU 9"),
    ([1, 1], {}, "names a GPU twice.*--oversubscribe"),
    ("free:5", {}, "asks for 5 GPUs.*--oversubscribe"),
    (2, {"accelerator": "tpu"}, "no TPU is visible on this machine"),
    (2, {"accelerator": "mps"}, "unknown accelerator 'mps'; there are: auto, cpu, gpu, cuda, tpu"),
    (0, {"accelerator": "gpu"}, "--devices 0 means CPU, --accelerator gpu a GPU"),
    ("1", {"accelerator": "cpu"}, "names GPUs, but --accelerator cpu was written"),
    (-1, {"accelerator": "cpu"}, "names GPUs, but --accelerator cpu was written"),
], ids=repr)  # fmt: skip
def test_what_cannot_be_had_is_one_line(machine: Machine, spec: Any, options: Any, says: str) -> None:
    with pytest.raises(DeviceError, match=says) as caught:
        resolve(spec, machine=machine, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["0", [0], -1])
def test_gpus_where_there_are_none(spec: Any) -> None:
    with pytest.raises(DeviceError, match="no NVIDIA GPU is visible"):
        resolve(spec, machine=CPU)
    with pytest.raises(DeviceError, match=r"no NVIDIA GPU is visible.*--accelerator cpu or auto"):
        resolve(2, accelerator="gpu", machine=CPU)


def test_oversubscribed_ranks_are_dealt_round_robin(machine: Machine) -> None:
    devices = resolve(5, oversubscribe=True, machine=Machine(cores=8, gpus=cards(2)))
    assert devices.names == ("cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0")
    assert str(devices) == "cuda:0-1"
    assert resolve([1, 1], oversubscribe=True, machine=machine).names == ("cuda:1", "cuda:1")
    busy = Machine(cores=8, gpus=cards(2, users={0: (77,)}), leases=machine.leases)
    assert resolve("free:2", oversubscribe=True, machine=busy).names == ("cuda:1", "cuda:1")


@pytest.mark.parametrize(("visible", "uuids"), [
    (None, ["GPU-0aaaa", "GPU-1aaaa", "GPU-2aaaa", "GPU-3aaaa"]),
    ("3,1", ["GPU-3aaaa", "GPU-1aaaa"]),
    (" 2 , 0 ", ["GPU-2aaaa", "GPU-0aaaa"]),
    ("GPU-2aaaa,GPU-1", ["GPU-2aaaa", "GPU-1aaaa"]),
    ("MIG-1234,0", ["MIG-1234", "GPU-0aaaa"]),
    ("0,9,1", ["GPU-0aaaa"]),  # CUDA stops at what it does not know
    ("0,-1,1", ["GPU-0aaaa"]),
    ("GPU-", []),  # not clear which
    ("1,1", []),
    ("", []),
], ids=repr)  # fmt: skip
def test_indices_count_within_cuda_visible_devices(visible: str | None, uuids: list[str]) -> None:
    machine = Machine(cores=8, gpus=cards(4), visible=visible)
    assert [card.uuid for card in machine.cards()] == uuids
    if uuids:
        devices = resolve(-1, machine=machine)
        assert list(devices.uuids) == uuids
        assert list(devices.names) == [f"cuda:{index}" for index in range(len(uuids))]
    else:
        with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES=.* shows none of the 4 GPUs"):
            resolve(-1, machine=machine)
        assert resolve(2, machine=machine).names == ("cpu", "cpu")


def test_said_in_one_word(machine: Machine) -> None:
    assert str(resolve(4, machine=machine)) == "cuda:0-3"
    assert str(resolve([0, 1, 3], machine=machine)) == "cuda:0-1,3"
    assert str(resolve("2", machine=machine)) == "cuda:2"
    assert str(resolve(4, machine=CPU)) == "cpu"


def test_cards_that_others_use_are_left_alone(tmp_path: Path) -> None:
    others = {0: (77,), 2: (5, 78)}
    machine = Machine(cores=8, gpus=cards(4, others, used={3: 9 * GIB}), mine=frozenset([5]), leases=tmp_path)
    assert resolve("auto", machine=machine).names == ("cuda:1",)
    with pytest.raises(
        DeviceError, match=r"1 GPU that nobody is using \(GPU 0 is used by process 77, 1.07 GB; .*GPU 3 has"
    ):
        resolve("free:2", machine=machine)
    assert resolve(4, machine=machine).names[0] == "cuda:0", "who names cards gets them"
    assert os.listdir(tmp_path) == [], "what was not kept is free again"


def test_what_this_notebook_uses_itself_is_free_to_it(tmp_path: Path) -> None:
    seen = Machine(cores=8, gpus=cards(1, {0: (5,)}, {0: 9 * GIB}), mine=frozenset([5]), leases=tmp_path)
    assert resolve("auto", machine=seen).names == ("cuda:0",)
    hidden = Machine(cores=8, gpus=cards(1, used={0: 9 * GIB}), cuda_here=True, leases=tmp_path)
    assert resolve("auto", machine=hidden).names == ("cuda:0",)


def test_no_card_free_is_an_error_and_never_silently_cpu(tmp_path: Path) -> None:
    machine = Machine(cores=8, gpus=cards(1, {0: (77,)}), leases=tmp_path)
    with pytest.raises(DeviceError, match=r"no GPU is free \(GPU 0 is used by process 77.*write -1"):
        resolve("auto", machine=machine)


# ---------------------------------------------------------------- leases

HOLDER = """
import sys
from pathlib import Path
from nbtrain.machine.leases import Lease
lease = Lease(Path(sys.argv[1]))
print([lease.add(uuid) for uuid in sys.argv[2:]], flush=True)
sys.stdin.readline()
lease.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@contextmanager
def another_notebook(directory: Path, *uuids: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", HOLDER, str(directory), *uuids]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_two_notebooks_do_not_take_the_same_card(machine: Machine, tmp_path: Path) -> None:
    with another_notebook(tmp_path, "GPU-0aaaa", "GPU-2aaaa") as (process, said):
        assert said == "[True, True]"
        devices = resolve("free:2", machine=machine)
        assert devices.names == ("cuda:1", "cuda:3")
        with pytest.raises(DeviceError, match=f"GPU 0 is leased by another notebook of yours .process {process.pid}"):
            resolve("free:3", machine=machine)
        with another_notebook(tmp_path, *(card.uuid for card in machine.gpus)) as (_, said):
            assert said == "[False, False, False, False]"


def test_a_closed_lease_is_free_for_others_and_leaves_no_file(machine: Machine, tmp_path: Path) -> None:
    with another_notebook(tmp_path, "GPU-0aaaa") as (process, _):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        with Lease(tmp_path) as mine:
            assert mine.add("GPU-0aaaa")
    assert os.listdir(tmp_path) == []


def test_a_killed_holder_gives_its_cards_back_at_once(machine: Machine, tmp_path: Path) -> None:
    with another_notebook(tmp_path, "GPU-0aaaa") as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert resolve("free:1", machine=machine).names == ("cuda:0",)


def test_the_next_cell_gets_the_same_cards(machine: Machine, tmp_path: Path) -> None:
    """The pool of the first cell computes on its cards; for this notebook they are still the free ones."""
    first = resolve("free:2", machine=machine)
    busy = Machine(cores=8, gpus=cards(4, {0: (77,), 1: (77,)}), leases=tmp_path)
    second = resolve("free:2", machine=busy)
    assert first == second
    first.lease.close()
    first.lease.close()
    assert second.lease.held_here("GPU-0aaaa")
    second.lease.close()
    assert os.listdir(tmp_path) == []


def test_a_dropped_lease_is_closed(machine: Machine, tmp_path: Path) -> None:
    devices = resolve("auto", machine=machine)
    assert len(os.listdir(tmp_path)) == 4
    del devices
    gc.collect()
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_give_the_lease_away(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        assert lease.add("GPU-0aaaa")
        child = os.fork()
        if child == 0:
            lease.close()
            os._exit(Lease(tmp_path).add("GPU-0aaaa"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child could lease what its parent has"
        with another_notebook(tmp_path, "GPU-0aaaa") as (_, said):
            assert said == "[False]"


def test_leases_lie_in_a_directory_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Lease() as lease:
        assert lease.directory == tmp_path / "nbtrain"
        assert lease.directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "nbtrain").chmod(0o755)
    with pytest.raises(DeviceError, match="is not a private directory of yours"):
        Lease()
    (tmp_path / "nbtrain").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "nbtrain").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match="is not a private directory of yours"):
        Lease()


# ---------------------------------------------------------------- this machine


def test_this_machine_resolves() -> None:
    machine = here()
    assert os.getpid() in machine.mine
    assert resolve(2, accelerator="cpu").names == ("cpu", "cpu")
    assert 1 <= len(resolve("auto", accelerator="cpu").names) <= min(4, machine.cores)


@pytest.mark.parametrize(("world", "cores", "threads"), [(1, 8, 8), (4, 8, 2), (3, 8, 2), (4, 2, 1), (0, 4, 4)])
def test_ranks_share_the_cores_fairly(world: int, cores: int, threads: int) -> None:
    assert threads_per_rank(world, cores) == threads
