"""What a rank may use: of the machine's memory, of its container's, of a card that others use too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nbtrain.annexes.planning.plan.device_memory import (
    CONTEXT,
    INTERPRETER,
    NCCL,
    DeviceMemory,
    DeviceRoom,
    device_rooms,
    devices_flag,
    in_memory,
    on_card,
)
from nbtrain.base.specs import PoolSpec
from nbtrain.machine import devices, host
from nbtrain.machine.devices import Machine
from nbtrain.machine.gpus import Gpu, GpuUser
from nbtrain.machine.host import HostMemory
from nbtrain.machine.registry import STRATEGIES

GB = 10**9


@pytest.mark.parametrize(("limit", "available", "ranks", "own", "room", "why"), [
    (64, 40, 4, 0, 10, "24 GB of the machine's 64 GB are in use, by the notebook among others; 4 ranks "),
    (8, 6, 1, 0, 6, "2 GB of the 8 GB that this container may use are in use"),
    (64, 4, 2, 8, 6, "52 GB of the machine's 64 GB are in use"),  # what the ranks hold is theirs to use
    (64, 4, 2, 80, 32, "0 B of the machine's 64 GB are in use"),
])  # fmt: skip
def test_ranks_share_what_is_free(limit: int, available: int, ranks: int, own: int, room: int, why: str) -> None:
    one = in_memory(HostMemory(host=64 * GB, limit=limit * GB, available=available * GB), ranks, own=own * GB)
    assert one.bytes == room * GB - INTERPRETER
    assert why in one.why


def test_there_is_no_less_than_nothing() -> None:
    assert in_memory(HostMemory(host=GB, limit=GB, available=GB // 100), 8).bytes == 0


def test_on_a_card_others_are_named_and_our_ranks_are_not_others() -> None:
    users = (GpuUser(pid=7, memory=12 * GB), GpuUser(pid=8, memory=30 * GB), GpuUser(pid=os.getpid(), memory=2 * GB))
    card = Gpu(index=0, uuid="GPU-1", name="A", total=80 * GB, used=44 * GB, users=users)
    one = on_card("cuda:0", card, 1, own=[8])
    assert one.bytes == 66 * GB - CONTEXT
    assert one.why.startswith("14 GB of the 80 GB of cuda:0 are in use by others, 2 GB of it by the notebook itself; ")
    assert on_card("cuda:0", card, 2, own=[8]).bytes == 33 * GB - CONTEXT


def test_ranks_of_a_group_have_less_of_a_card_by_what_nccl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(Gpu(index=at, uuid=f"GPU-{at}", name="A", total=80 * GB, used=0, users=()) for at in range(2))
    monkeypatch.setattr(devices, "here", lambda: Machine(cores=8, gpus=cards))
    pool = PoolSpec(kind="cuda", devices=("cuda:0", "cuda:1"))
    at = DeviceMemory.of(pool)
    assert at.alone.bytes == 80 * GB - CONTEXT, "a rank by itself forms no group"
    assert [one.bytes for one in at.each] == [80 * GB - CONTEXT - NCCL] * 2
    shared = device_rooms("cuda", ("cuda:0", "cuda:0"), 2)
    assert [one.bytes for one in shared] == [40 * GB - CONTEXT - NCCL] * 2
    assert CONTEXT + NCCL >= 1.2 * GB, "what was measured of a rank"


def test_a_card_whose_memory_nobody_says_has_no_room_and_says_so() -> None:
    one = on_card("cuda:3", None, 1)
    assert (one.why, one.known) == ("the driver does not report the memory of cuda:3", False)
    pool = PoolSpec(kind="cuda", devices=("cuda:3",))
    at = DeviceMemory(pool=pool, precision="32", accumulate=1, alone=one, each=(one,))
    single = at.world(STRATEGIES["single"].needs)
    assert at.may_have(single, 0) is None
    assert at.at_most(GB, "--memory 1GB").may_have(single, 0) == GB
    full = Gpu(index=3, uuid="GPU-3", name="A", total=80 * GB, used=80 * GB, users=())
    one = on_card("cuda:3", full, 1)
    assert (one.bytes, one.known) == (0, True)


def test_here_a_process_of_ours_makes_room_by_what_it_holds() -> None:
    """The real machine, on which other things go on: only a large difference can be told from noise."""
    code = "import sys; held = bytearray(b'x') * 600_000_000; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        free = host.memory().available
        mine = device_rooms("cpu", ("cpu",), 1, [child.pid])[0]
        child.communicate()
    assert mine.bytes + INTERPRETER > min(free, host.memory().available) + 300_000_000


def test_a_strategy_has_the_ranks_and_the_room_that_it_needs() -> None:
    at = DeviceMemory(
        pool=PoolSpec(devices=("cpu",) * 4), precision="32", accumulate=1, alone=_room(4 * GB), each=(_room(GB),) * 4
    )
    worlds = {name: at.world(entry.needs) for name, entry in STRATEGIES.items()}
    assert {name: worlds[name].ranks for name in ("single", "dp", "ddp", "fsdp")} == {
        "single": 1, "dp": 1, "ddp": 4, "fsdp": 4,
    }  # fmt: skip
    assert worlds["dp"].devices == 4
    assert [at.room(worlds[name]).bytes for name in ("single", "dp", "ddp")] == [4 * GB, 4 * GB, GB]


def test_what_travels_to_the_ranks_is_in_the_machines_memory_once() -> None:
    at = DeviceMemory(
        pool=PoolSpec(devices=("cpu",) * 4), precision="32", accumulate=1, alone=_room(4 * GB), each=(_room(GB),) * 4
    )
    ddp, single = (at.world(STRATEGIES[name].needs) for name in ("ddp", "single"))
    assert (at.may_have(ddp, 2 * GB), at.may_have(single, 2 * GB)) == (GB // 2, 2 * GB)
    assert at.at_most(GB // 4, "--memory 250MB").may_have(ddp, 2 * GB) == GB // 4, "the user's limit is of a rank alone"


def test_the_least_of_the_cards_decides() -> None:
    pool = PoolSpec(kind="cuda", devices=("cuda:0", "cuda:1"))
    at = DeviceMemory(pool=pool, precision="32", accumulate=1, alone=_room(9), each=(_room(9), _room(5)))
    assert at.room(at.world(STRATEGIES["ddp"].needs)).bytes == 5
    assert at.room(at.world(STRATEGIES["dp"].needs)).bytes == 5


def test_a_limit_of_the_users_is_the_room() -> None:
    at = DeviceMemory.of(PoolSpec(devices=("cpu", "cpu"))).at_most(1000, "--memory 1kB")
    assert [one.bytes for one in (at.alone, *at.each)] == [1000] * 3
    assert at.each[0].why == "--memory 1kB is what a rank may use"


@pytest.mark.parametrize(("pool", "typed"), [
    (PoolSpec(kind="cuda", devices=("cuda:0", "cuda:1")), "--devices 2"),
    (PoolSpec(kind="cuda", devices=("cuda:0", "cuda:2")), '--devices "0,2"'),
    (PoolSpec(kind="cuda", devices=("cuda:0",) * 3), "--devices 3 --oversubscribe"),
    (PoolSpec(kind="tpu", devices=("xla:0",) * 4), "--devices 4 --accelerator tpu"),
])  # fmt: skip
def test_devices_are_typed_so_that_they_are_these(pool: PoolSpec, typed: str) -> None:
    assert devices_flag(pool, len(pool.devices)) == typed


def test_a_line_says_what_makes_the_figures_true() -> None:
    pool = PoolSpec(kind="cuda", devices=("cuda:0", "cuda:1"), nodes=2)
    at = DeviceMemory(pool=pool, precision="bf16-mixed", accumulate=4, alone=_room(9), each=(_room(9), _room(9)))
    line = at.line("fsdp", at.world(STRATEGIES["fsdp"].needs), ("--cpu-offload",))
    assert line == "--strategy fsdp --cpu-offload --devices 2 --nodes 2 --precision bf16-mixed --accumulate 4"
    assert at.line("single", at.world(STRATEGIES["single"].needs)).startswith("--strategy single --devices 1 --prec")


def _room(size: int) -> DeviceRoom:
    return DeviceRoom(bytes=size, why="")
