"""A checkpoint is whole or not there, and the training goes on from it under any strategy on any number of ranks.

Every strategy of the registry saves one. `make verify` loads each under three strategies and under each strategy three,
as SEED draws them; `make parity` (PARITY=all) loads every one under every other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import resource
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.base.errors import NbtrainError, NotSupported, UsageError
from nbtrain.base.specs import PoolSpec, RankInfo, RunSpec
from nbtrain.machine import registry
from nbtrain.strategies.base import Strategy, share_of
from nbtrain.strategies.ddp import DDP
from nbtrain.strategies.none import NoStrategy
from nbtrain.strategies.single import Single
from nbtrain.worker.checkpoints import api, folder, newest, open_checkpoint
from nbtrain.worker.checkpoints.content import TensorInfo, owners
from nbtrain.worker.ranks import collectives
from tests.support.bench import cell, cell_at
from tests.support.flat import FlatPieces
from tests.support.ranks import run_on_ranks, without_group
from tests.support.variants import EVERYTHING, SEED

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

BATCH = 12
SPEC = RunSpec(pool=PoolSpec())


class NextToken(nn.Module):
    """Tied weights, a frozen layer, a buffer without dimensions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.out = nn.Linear(width, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(F.relu(self.inner(self.embed(x))))
        return self.out(self.frozen(h) * self.scale)


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = NextToken()
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, scheduler: Any, steps: range, rank: int = 0, world: int = 1) -> None:
    """The same global batches on any number of ranks."""
    for step in steps:
        x = batch(step)[rank::world]
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        model.seen.add_(1)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """As plain numbers; the cell is still running, so everything is whole under `ddp` and the flat strategy."""
    found = {key: value.detach().clone() for key, value in model.state_dict().items()}
    for i, group in enumerate(optimizer.param_groups):
        found[f"lr {i}"] = torch.tensor(group["lr"])
    return found


@dataclass(frozen=True, slots=True)
class Setup:
    """A strategy on some devices."""

    make: Callable[[], Strategy]
    devices: int = 2
    nodes: int = 1
    together: bool = False

    @property
    def ranks(self) -> int:
        return 1 if self.together else self.devices

    def place(self, rank: int) -> RankInfo:
        devices = ("cpu",) * self.devices if self.together else ()
        return RankInfo(
            rank=rank, world_size=self.ranks, local_rank=rank % (self.ranks // self.nodes), device="cpu", threads=1,
            devices=devices, nodes=self.nodes,
        )  # fmt: skip


DEVICES = {"single": 1, "fsdp": 4, "ddp2": 4}
"""Where it is not two."""
NODES = {"ddp2": 2}
GIVEN: Mapping[str, tuple[Mapping[str, Any], ...]] = {"deepspeed": ({"stage": 2}, {"stage": 3})}
"""Options with which more is different than how a step is computed."""


def setups() -> dict[str, Setup]:
    found = {"flat-3": Setup(lambda: FlatPieces(FlatPieces.Options()), 3)}
    for name, entry in registry.STRATEGIES.items():
        if any(find_spec(package) is None for package in entry.needs.packages) or entry.load().facts.hands_off:
            continue
        for given in GIVEN.get(name, ({},)):
            devices = DEVICES.get(name, 2)
            found["-".join(map(str, [name, *given.values(), devices]))] = Setup(
                partial(registry.make_strategy, name, given, {}), devices, NODES.get(name, 1), entry.needs.together
            )
    return found


SETUPS = setups()


def read_under(setup: str) -> list[str]:
    """The setups whose checkpoints are loaded under this one: its own, and others that follow it in a circle."""
    if EVERYTHING:
        return [*SETUPS]
    circle = random.Random(SEED).sample([*SETUPS], len(SETUPS))
    at = circle.index(setup)
    return [circle[(at + step) % len(circle)] for step in (0, 1, 3)]


def on(setup: str, function: Any, *args: Any) -> list[Any]:
    world = SETUPS[setup].ranks
    return run_on_ranks(
        without_group if world == 1 else function,
        *((function, *args) if world == 1 else args),
        world_size=world,
        timeout=120,
    )


def _save(rank: int, setup: str, path: str) -> None:
    place, strategy = SETUPS[setup].place(rank), SETUPS[setup].make()
    model, optimizer, scheduler = make()
    with cell_at(place, strategy, model=model, optimizer=optimizer, scheduler=scheduler):
        share = share_of(strategy, rank, place.world_size)
        train(model, optimizer, scheduler, range(3), *share)
        api.save(path)
        api.save(f"{path}-full", full=True)
        train(model, optimizer, scheduler, range(3, 4), *share)  # while it is written


def _load(rank: int, setup: str, paths: list[str]) -> None:
    """Each, into objects that have not trained; then a step, and what comes of it is saved."""
    place = SETUPS[setup].place(rank)
    for path in paths:
        model, optimizer, scheduler = make(seed=1)
        strategy = SETUPS[setup].make()
        with cell_at(place, strategy, model=model, optimizer=optimizer, scheduler=scheduler):
            api.load(path)
            train(model, optimizer, scheduler, range(3, 4), *share_of(strategy, rank, place.world_size))
            api.save(f"{path}-{setup}")


def reference(steps: int = 4) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, range(steps))
    return {**model.state_dict(), **{f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(optimizer.param_groups)}}


def loaded(path: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Into plain objects, without any ranks."""
    model, optimizer, scheduler = make(seed=2)
    api.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
    found = {**model.state_dict(), **{f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(optimizer.param_groups)}}
    return found, (model, optimizer, scheduler)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    api._plain = api._resume = None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of every setup, a checkpoint after three steps."""
    parent = tmp_path_factory.mktemp("checkpoints")
    paths = {setup: str(parent / f"of-{setup}") for setup in SETUPS}
    for setup, path in paths.items():
        on(setup, _save, setup, path)
    return paths


def agrees(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{what}: {key}: {m}"
        )


@pytest.mark.sample("flat-3")
@pytest.mark.limit(300)
@pytest.mark.parametrize("setup", SETUPS)
def test_every_pair(setup: str, saved: dict[str, str]) -> None:
    """Saved under another, loaded under this one, a step: as if it had never stopped."""
    found, _ = loaded(saved[setup])
    agrees(found, reference(3), setup)
    paths = [saved[other] for other in read_under(setup)]
    on(setup, _load, setup, paths)
    four, five = reference(4), reference(5)
    for path in paths:
        found, objects = loaded(f"{path}-{setup}")
        agrees(found, four, path)
        train(*objects, range(4, 5))  # the optimizer's state, too
        agrees(objects[0].state_dict(), {key: value for key, value in five.items() if key[:2] != "lr"}, path)
    assert not [name for name in os.listdir(Path(saved[setup]).parent) if name.startswith(".")]


@pytest.mark.sample(first=2)
@pytest.mark.parametrize("setup", SETUPS)
def test_full(setup: str, saved: dict[str, str]) -> None:
    """One file that plain PyTorch loads; and the training goes on from the folder."""
    path = f"{saved[setup]}-full"
    assert sorted(os.listdir(path)) == [folder.MARKER, "model.safetensors", "training.safetensors"]
    model = NextToken()
    model.load_state_dict(load_file(f"{path}/model.safetensors"))
    three = reference(3)
    agrees(model.state_dict(), {key: value for key, value in three.items() if key[:2] != "lr"}, setup)
    found, objects = loaded(path)
    agrees(found, three, setup)
    train(*objects, range(3, 4))
    agrees(objects[0].state_dict(), {k: v for k, v in reference(4).items() if k[:2] != "lr"}, setup)


def test_who_writes_what() -> None:
    """Pieces by who keeps them, of several the first; the rest spread by bytes."""
    described = {name: TensorInfo((10, 10), torch.float32) for name in "abcd"}
    described["empty"] = TensorInfo((0, 3), torch.float32)
    kept = [{"a": [(0, 60)]}, {"a": [(30, 80), (80, 100)]}, {"a": [(0, 100)]}]
    mine = owners(described, kept)
    assert [one.get("a") for one in mine] == [[(0, 60)], [(60, 80), (80, 100)], None]
    assert sorted(key for one in mine for key in one if key != "a") == ["b", "c", "d"]
    assert [sum(b - a for ranges in one.values() for a, b in ranges) for one in mine] == [160, 140, 100]
    with pytest.raises(NbtrainError, match="the ranks keep 80 only"):
        owners({"a": described["a"]}, [{"a": [(0, 50)]}, {"a": [(40, 80)]}])


def plain() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Trained for two steps."""
    objects = make()
    train(*objects, range(2))
    return objects


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_crash_while_writing_leaves_the_one_before_whole(tmp_path: Path) -> None:
    """SIGKILL at some moments of the second save; what is loaded is the first or the second, never a mixture."""
    path = str(tmp_path / "last")
    model = nn.Linear(1000, 2000)  # 8 MB
    with torch.no_grad():
        model.weight.fill_(1)
    api.save(path, model=model)
    seen = set()
    for moment in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                with torch.no_grad():
                    model.weight.fill_(2)
                for _ in range(1000):
                    api.save(path, model=model)
            finally:
                os._exit(0)
        deadline = time.monotonic() + 20
        while not _being_written(tmp_path) and time.monotonic() < deadline:
            pass
        time.sleep(moment * 0.004)  # a moment in the middle of it, another one each time
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        other = nn.Linear(1000, 2000)
        api.load(path, model=other)
        numbers = set(other.weight.flatten().tolist())
        assert len(numbers) == 1
        seen |= {bool(_being_written(tmp_path))}
    assert True in seen  # it was killed in the middle
    api.save(path, model=model)
    assert os.listdir(tmp_path) == ["last"]


def _being_written(parent: Path) -> list[str]:
    return [name for name in os.listdir(parent) if name.endswith(".tmp")]


def test_one_that_was_put_aside_is_found(tmp_path: Path) -> None:
    """Killed between the two renames."""
    model, *_ = plain()
    api.save(tmp_path / "last", model=model)
    os.rename(tmp_path / "last", tmp_path / f".last.{folder._host()}-999999999-0.old")
    other = NextToken()
    api.load(tmp_path / "last", model=other)
    agrees(state(other), state(model), "put aside")
    api.save(tmp_path / "another", model=model)
    assert sorted(os.listdir(tmp_path)) == ["another", "last"]


def test_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    model, optimizer, scheduler = plain()
    api.save(tmp_path / "a", model=model, optimizer=optimizer, scheduler=scheduler)
    other = NextToken(width=6)
    other.more = nn.Linear(2, 2)
    before = state(other)
    with pytest.raises(UsageError) as raised:
        api.load(tmp_path / "a", model=other)
    text = str(raised.value)
    assert "model.embed.weight is (11, 8) there and (11, 6) here" in text
    assert "model.inner.weight is (8, 8) there and (6, 6) here" in text
    assert "Nothing was changed" in text
    agrees(state(other), before, "refused")

    fresh, _, _ = make(seed=3)
    before = state(fresh)
    sgd = torch.optim.SGD(fresh.parameters(), lr=0.3)
    with pytest.raises(UsageError, match="optimizer is AdamW there and SGD here"):
        api.load(tmp_path / "a", model=fresh, optimizer=sgd)
    one_group = torch.optim.AdamW(fresh.parameters(), lr=0.3)
    with pytest.raises(UsageError, match="optimizer has 2 groups of parameters there and 1 here"):
        api.load(tmp_path / "a", model=fresh, optimizer=one_group)
    assert one_group.param_groups[0]["lr"] == 0.3
    agrees(state(fresh), before, "refused")
    with pytest.raises(UsageError, match="there is no checkpoint"):
        api.load(tmp_path / "nowhere", model=fresh)


def test_names(tmp_path: Path) -> None:
    """One model under another name is the one; of two it has to be said which."""
    model, optimizer, scheduler = plain()
    api.save(tmp_path / "a", net=model, opt=optimizer, plan=scheduler)
    other, adam, cosine = make(seed=4)
    api.load(tmp_path / "a", other, adam, cosine)
    agrees(state(other), state(model), "renamed")
    assert cosine.last_epoch == 2
    second = nn.Linear(3, 3)
    api.save(tmp_path / "two", net=model, second=second)
    with pytest.raises(UsageError, match="has models 'net', 'second', and nothing for model"):
        api.load(tmp_path / "two", model=other)
    third = nn.Linear(3, 3)
    api.load(tmp_path / "two", second=third)
    assert torch.equal(third.weight, second.weight)


def test_compiled_is_the_same_model(tmp_path: Path) -> None:
    model, _, _ = plain()
    api.save(tmp_path / "a", model=torch.compile(model))
    other = NextToken()
    api.load(tmp_path / "a", model=other)
    agrees(state(other), state(model), "compiled")


def _intervals(rank: int, parent: str, keep: int) -> list[str]:
    os.chdir(parent)
    spec = RunSpec(pool=PoolSpec(), save_steps=2, keep_last=keep)
    model, optimizer, _ = make()
    data = DataLoader(TensorDataset(torch.randint(0, 11, (40, 5))), batch_size=2)
    with cell(rank, 2, DDP(DDP.Options()), spec, model=model, optimizer=optimizer, loader=data):
        for (x,) in data:  # 10 steps
            loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return sorted(os.listdir("checkpoints"))


def test_every_k_steps_and_keep_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(_intervals, str(tmp_path), 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000008", "step-000010"]
    model, optimizer, _ = make(seed=5)
    api.load(tmp_path / "checkpoints", model=model, optimizer=optimizer)
    assert "the newest whole checkpoint in there is step-000010 (step 10)" in capsys.readouterr().err
    assert {int(held["step"]) for held in optimizer.state.values()} == {10}
    (tmp_path / "checkpoints" / "step-000010" / "rank-0.safetensors").unlink()  # not whole any more
    api.load(tmp_path / "checkpoints", model=model, optimizer=optimizer)
    assert {int(held["step"]) for held in optimizer.state.values()} == {8}


def _made_by_deepspeed(rank: int, parent: str) -> dict[str, torch.Tensor]:
    """With DeepSpeed's own calls, as any script would."""
    from nbtrain.strategies.deepspeed.library import library

    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed = library(torch.device("cpu"))  # the library itself, without the op that it would compile for a minute
    model, *_ = make()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3 if parent.endswith("3") else 2},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    x = batch(0)[rank::2]
    engine.backward(F.cross_entropy(engine(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))
    engine.step()
    engine.save_checkpoint(parent)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return state(engine.module)


@pytest.mark.sample("2")
@pytest.mark.limit(200)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_that_deepspeed_made(stage: int, tmp_path: Path) -> None:
    path = tmp_path / f"stage-{stage}"
    wanted = run_on_ranks(_made_by_deepspeed, str(path), world_size=2, timeout=120)[0]
    assert (path / "latest").is_file()
    model, *_ = make(seed=1)
    with pytest.raises(UsageError, match="DeepSpeed has written it: ") as refused:
        api.load(path, model=model)
    line = str(refused.value).split("written it: ")[1].split(" in the notebook")[0]
    exec(f"import deepspeed.utils.zero_to_fp32\n{line}", {"model": model})
    agrees(state(model), wanted, "by the line that was named")


def _by_time(rank: int, parent: str) -> int:
    spec = RunSpec(pool=PoolSpec(), save_seconds=0.3, save_to=f"{parent}/timed", keep_last=100)
    model, optimizer, scheduler = make()
    with cell(rank, 2, DDP(DDP.Options()), spec, model=model, optimizer=optimizer, scheduler=scheduler):
        end = time.monotonic() + 1.2
        flag = torch.ones(1)
        step = 0
        while flag.item():
            train(model, optimizer, scheduler, range(step, step + 1), rank, 2)
            step += 1
            flag.fill_(time.monotonic() < end)
            torch.distributed.broadcast(flag, 0)
    return step


def test_by_time_all_ranks_save_the_same_steps(tmp_path: Path) -> None:
    run_on_ranks(_by_time, str(tmp_path))
    made = folder.inside(tmp_path / "timed")
    assert 2 <= len(made) <= 4
    assert all(said["ranks"] == 2 for _, said in made)


def _unwritable(rank: int, path: str) -> list[str]:
    """The disk is full, as far as rank 1 knows: its file cannot grow."""
    model, optimizer, scheduler = make()
    said = []
    with cell(rank, 2, FlatPieces(FlatPieces.Options()), model=model, optimizer=optimizer, scheduler=scheduler):
        train(model, optimizer, scheduler, range(1), rank, 2)
        api.save(path)
        api.current().finish()
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        train(model, optimizer, scheduler, range(1, 2), rank, 2)
        api.save(path)
        train(model, optimizer, scheduler, range(2, 3), rank, 2)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            api.save(path)
        except NbtrainError as error:
            said.append(str(error))
        api.save(path + "-2")
    return said


def test_what_goes_wrong_in_the_thread_is_raised_by_the_next_save_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "last"
    for said in run_on_ranks(_unwritable, str(path)):
        assert len(said) == 1
        assert "could not be written" in said[0]
        assert "rank 1" in said[0]
        assert "there is no room for it" in said[0]
    assert sorted(os.listdir(tmp_path)) == ["last", "last-2"]
    _, (_, optimizer, _) = loaded(str(path))
    assert {int(held["step"]) for held in optimizer.state.values()} == {1}


def _full_for_a_while(rank: int, parent: str) -> None:
    spec = RunSpec(pool=PoolSpec(), save_steps=1, save_to=parent, keep_last=9)
    model, optimizer, scheduler = make()
    with cell(rank, 2, DDP(DDP.Options()), spec, model=model, optimizer=optimizer, scheduler=scheduler):
        for step in range(7):
            if step in (2, 4):
                api.current().finish()
            if rank == 1 and step == 2:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            if rank == 1 and step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            train(model, optimizer, scheduler, range(step, step + 1), rank, 2)
        api.current().finish()


def test_a_full_disk_at_an_interval_is_said_once_and_the_cell_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(_full_for_a_while, str(tmp_path))
    said = capfd.readouterr().err
    assert said.count("could not be written: rank 1") == 1, said
    assert "there is no room for it" in said
    assert "the cell goes on, and --save-every tries again" in said
    made = os.listdir(tmp_path)
    assert {"step-000001", "step-000006"} <= set(made)
    assert "step-000003" not in made


def _keeps_waiting(rank: int, path: str, short_of: str) -> tuple[list[str], float]:
    """Rank 1 has no memory for its share, or its disk has no room even for a note; the next cell comes."""
    said: list[str] = []
    model = nn.ParameterList(torch.zeros(1000) for _ in range(2))

    def no_memory() -> torch.Tensor:
        raise MemoryError("for a copy")

    with cell(rank, 2, DDP(DDP.Options()), model=model) as runtime:
        if rank == 1 and short_of == "memory":
            model[1].detach = no_memory
        elif rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            api.save(path)
        except MemoryError as error:
            said.append(str(error))
            del model[1].detach
        runtime.end(False)
        began = time.monotonic()
        runtime.begin(SPEC, {"model": model})
        waited = time.monotonic() - began
        while api.current().work.writing.left_behind:
            api.current().finish()
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        api.save(path)
    return said, waited


@pytest.mark.parametrize("short_of", ["memory", "room"])
def test_a_rank_that_cannot_save_keeps_nobody_waiting(
    short_of: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 writes by then; what became of it is told, the next cell does not wait for it, and its save is whole."""
    (_, first), (said, second) = run_on_ranks(_keeps_waiting, str(tmp_path / "a"), short_of)
    assert max(first, second) < 5
    if short_of == "memory":
        assert said == ["for a copy"]
        assert "could not be written: rank 1: MemoryError" in capfd.readouterr().err
    else:
        assert "was abandoned: rank 1 ended before it had written" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["a"]
    assert folder.marker(tmp_path / "a") is not None


def test_what_goes_wrong_at_the_end_is_raised_there(tmp_path: Path) -> None:
    model, *_ = plain()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is there already, and is no whole checkpoint"):
        api.save(tmp_path / "file", model=model)
    with pytest.raises(NbtrainError, match="could not be written"):
        api.save(tmp_path / "file" / "below", model=model)
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(UsageError, match="a checkpoint is a folder"):
        api.save(tmp_path / "best.safetensors", model=model, full=True)
    with pytest.raises(UsageError, match="in the notebook, say what"):
        api.save(tmp_path / "a")
    with pytest.raises(UsageError, match="not list"):
        api.save(tmp_path / "a", [1])


def _under_none(rank: int, path: str) -> str:
    model, *_ = make()
    with cell(rank, 2, NoStrategy(NoStrategy.Options()), model=model):
        try:
            api.save(path)
        except NotSupported as error:
            return str(error)
    return ""


def test_under_none_it_is_refused(tmp_path: Path) -> None:
    assert all("under -s none" in said for said in run_on_ranks(_under_none, str(tmp_path / "a")))


def test_weights_alone(tmp_path: Path) -> None:
    """A safetensors file made elsewhere; and two models, each in a file of its own."""
    model, *_ = plain()
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    other = NextToken()
    api.load(tmp_path / "w.safetensors", other)
    agrees(state(other), state(model), "a file")
    half = nn.Linear(3, 3).to(torch.bfloat16)
    api.save(tmp_path / "gan", G=model, D=half, full=True)
    names = ["D.safetensors", "G.safetensors", folder.MARKER, "training.safetensors"]
    assert sorted(os.listdir(tmp_path / "gan")) == names
    assert torch.equal(load_file(tmp_path / "gan" / "D.safetensors")["weight"], half.weight)
    lone = nn.Linear(3, 3).to(torch.bfloat16)
    api.load(tmp_path / "gan", D=lone)
    assert torch.equal(lone.weight, half.weight)


def _snapshot_is_of_the_moment(rank: int, path: str) -> None:
    model = nn.Linear(300, 300)
    with torch.no_grad():
        model.weight.fill_(1)
    with cell(rank, 2, DDP(DDP.Options()), model=model):
        api.save(path)
        with torch.no_grad():
            model.weight.fill_(2)  # while it is written


def test_what_is_written_is_what_there_was(tmp_path: Path) -> None:
    run_on_ranks(_snapshot_is_of_the_moment, str(tmp_path / "a"))
    model = nn.Linear(300, 300)
    api.load(tmp_path / "a", model=model)
    assert set(model.weight.flatten().tolist()) == {1.0}
    said = json.loads((tmp_path / "a" / folder.MARKER).read_text())
    assert list(said["files"]) == ["rank-0.safetensors", "rank-1.safetensors"]


def test_random_streams_go_on(tmp_path: Path) -> None:
    model, optimizer, _ = plain()
    api.save(tmp_path / "a", model=model, optimizer=optimizer)
    wanted = torch.rand(3)
    api.load(tmp_path / "a", model=model)
    assert not torch.equal(torch.rand(3), wanted)  # weights alone: nothing else moves
    api.load(tmp_path / "a", model=model, optimizer=optimizer)
    assert torch.equal(torch.rand(3), wanted)


def _of(model: nn.Module, parent: Path, steps: int, name: str = "model", **objects: Any) -> None:
    """A training of `steps` steps that saves each second one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = RunSpec(pool=PoolSpec(), save_steps=2, save_to=str(parent), keep_last=2)
    with cell(0, 1, Single(Single.Options()), spec, **{name: model}, optimizer=optimizer, **objects):
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()


def test_the_folder_of_another_training_is_left_alone(tmp_path: Path) -> None:
    to = tmp_path / "checkpoints"
    _of(nn.Linear(3, 3), to, 4)
    before = {path.name: path.stat().st_ino for path in to.iterdir()}
    assert sorted(before) == ["step-000002", "step-000004"]
    for other, name in ((nn.Linear(3, 4), "model"), (nn.Linear(3, 3), "second")):
        with pytest.raises(UsageError, match=r"checkpoints of another training.*--save-to checkpoints-2"):
            _of(other, to, 6, name)
    assert {path.name: path.stat().st_ino for path in to.iterdir()} == before
    lazy = nn.LazyLinear(4)
    with pytest.raises(UsageError, match="checkpoints of another training"):  # by the first save
        _of(lazy, to, 6)
    assert {path.name: path.stat().st_ino for path in to.iterdir()} == before
    # The same one, in another process, with a model beside it that the cell before did not use.
    _of(nn.Linear(3, 3), to, 6, teacher=nn.Linear(7, 7))
    assert sorted(path.name for path in to.iterdir()) == ["step-000004", "step-000006"]
    folder.prune(to, 0, {"another": ["x"]})
    assert len(list(to.iterdir())) == 2


def test_the_newest_is_the_newest_where_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1_000_000, -600)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    to, model = tmp_path / "checkpoints", nn.Linear(3, 3)
    _of(model, to, 9)
    assert sorted(path.name for path in to.iterdir()) == ["step-000006", "step-000008"]
    last = newest.last_number(str(to))
    assert newest.load_newest(str(to), last, {"model": nn.Linear(3, 3)}) is None
    _of(model, to, 5)  # begun again: these are newer
    assert sorted(path.name for path in to.iterdir()) == ["step-000002", "step-000004"]
    os.utime(to / "step-000004", (0, 0))
    assert newest.load_newest(str(to), last, {"model": (again := nn.Linear(3, 3))}) is not None
    whole = nn.Linear(3, 3)
    api.load(to / "step-000004", model=whole)
    assert torch.equal(again.weight, whole.weight)


def test_where_there_is_none_yet_nothing_is_loaded_if_that_is_allowed(tmp_path: Path) -> None:
    model, place = nn.Linear(3, 3), tmp_path / "checkpoints"
    before = model.weight.clone()
    api.load(place, model=model, missing_ok=True)
    place.mkdir()
    api.load(place, model=model, missing_ok=True)
    assert torch.equal(model.weight, before)
    api.save(place / "one", model=nn.Linear(3, 3))
    api.load(place, model=model, missing_ok=True)
    assert not torch.equal(model.weight, before)
    with pytest.raises(UsageError, match="there is no checkpoint"):
        api.load(tmp_path / "other", model=model)


def test_a_link_is_replaced_and_what_it_leads_to_is_not(tmp_path: Path) -> None:
    model, *_ = plain()
    wanted = state(model)
    api.save(tmp_path / "step", model=model)
    (tmp_path / "best").symlink_to("step")
    (tmp_path / "nowhere").symlink_to("gone")
    with torch.no_grad():
        model.scale.fill_(7)
    for name in ("best", "nowhere"):
        api.save(tmp_path / name, model=model)
        other = NextToken()
        api.load(tmp_path / name, model=other)
        agrees(state(other), state(model), name)
    assert sorted(os.listdir(tmp_path)) == ["best", "nowhere", "step"]
    other = NextToken()
    api.load(tmp_path / "step", model=other)
    agrees(state(other), wanted, "what it led to")


def _load_nothing(rank: int, path: str) -> tuple[str, list[Any]]:
    """Only rank 0 looks for the checkpoint; the others are told what it has not found."""
    model, optimizer, _ = make()
    with cell(rank, 2, registry.make_strategy("ddp", {}, {}), model=model, optimizer=optimizer):
        with pytest.raises(UsageError) as raised:
            api.load(path)
        return str(raised.value), collectives.gather(rank)


def test_what_one_rank_finds_wrong_is_raised_on_all(tmp_path: Path) -> None:
    found = run_on_ranks(_load_nothing, str(tmp_path / "nothing"))
    assert found == [(f"there is no checkpoint {tmp_path / 'nothing'}", [0, 1])] * 2


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_what_others_have_written_is_refused_with_the_line_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.format_utils

    monkeypatch.chdir(tmp_path)
    model = _net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "torchs", no_dist=True)
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, "of_lightning.ckpt")
    for name, lines in (
        ("torchs", r"written it: (.+) makes a file of it, and what torch.save has written is read by (.+)"),
        ("of_lightning.ckpt", r"Lightning's Trainer has by (.+)"),
    ):
        other = _net()
        with pytest.raises(UsageError) as refused:
            api.load(tmp_path / name, other)
        found = re.search(lines, str(refused.value))
        assert found is not None, refused.value
        for line in found.groups():
            exec(line.replace("(path)", f"({name!r})" if name.endswith("ckpt") else "('weights.pt')"),
                 {"model": other, "torch": torch})  # fmt: skip
        agrees(dict(other.state_dict()), dict(model.state_dict()), name)


class Runs:
    """Reading it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.place,)


class Own:
    """A class of the user's."""


def _replaced(place: Path, told: Mapping[str, Any]) -> None:
    """Put this into the `about` of a full checkpoint."""
    held = load_file(place / "training.safetensors")
    save_file({**held, "about": open_checkpoint.packed(told)}, place / "training.safetensors")
    said = json.loads((place / folder.MARKER).read_text())
    said["files"]["training.safetensors"] = (place / "training.safetensors").stat().st_size
    (place / folder.MARKER).write_text(json.dumps(said))


def test_reading_a_checkpoint_runs_no_code_of_who_wrote_it(tmp_path: Path) -> None:
    model, ran, other = _net(), tmp_path / "ran", _net()
    api.save(tmp_path / "full", model=model, full=True)
    _replaced(tmp_path / "full", {"tree": Runs(ran)})
    with pytest.raises(UsageError, match=r"holds posix.mkdir, and .* load\(path, weights_only=False\)"):
        api.load(tmp_path / "full", model=other)
    assert not ran.exists()


def test_what_a_checkpoint_holds_besides_weights_is_plain_or_asked_for(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "mine": frozenset("ab")}], lr=0.1)
    pure = [Path("a"), timedelta(1), datetime(2024, 1, 2, tzinfo=timezone.utc), np.str_("a"), np.array(["ab"]), 1j]
    optimizer.param_groups[0]["pure"] = pure
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    lr = torch.optim.lr_scheduler
    kept = {
        "onecycle": lr.OneCycleLR(optimizer, 1.0, 10), "cyclic": lr.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False),
        "plateau": lr.ReduceLROnPlateau(optimizer), "several": lr.MultiStepLR(optimizer, [2, 4]),
        "own": lr.LambdaLR(optimizer, lambda step: 1.0),
    }  # fmt: skip
    for full in (True, False):
        api.save(tmp_path / "plain", model=model, optimizer=optimizer, full=full, **kept)
        api.load(tmp_path / "plain", model=model, optimizer=optimizer, **kept)
        assert optimizer.param_groups[0]["pure"] == pure
    for other, named in ((deque([1]), "collections.deque"), (np.array([{}]), "numpy.dtypes.ObjectDType")):
        optimizer.param_groups[0]["mine"] = other
        api.save(tmp_path / "own", model=model, optimizer=optimizer)
        with pytest.raises(UsageError, match=rf"own holds {named}, and .*weights_only=False"):
            api.load(tmp_path / "own", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["mine"] = Own()
    api.save(tmp_path / "own", model=model, optimizer=optimizer)
    for wanted in ({}, {"optimizer": optimizer}):
        with pytest.raises(UsageError, match=rf"own holds {re.escape(Own.__module__)}.Own, and"):
            api.load(tmp_path / "own", model=model, **wanted)
    optimizer.param_groups[0]["mine"] = None
    api.load(tmp_path / "own", model=model, optimizer=optimizer, weights_only=False)
    assert type(optimizer.param_groups[0]["mine"]) is Own


@pytest.mark.parametrize("header", [
    b"[" * 100_000, b"[]", b"\xff", b"{", b'{"w": 1}', b'{"w": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400000000000]}}',
    b'{"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
], ids=range(9))  # fmt: skip
def test_a_header_that_is_none_is_said_in_a_sentence(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UsageError, match=r"w\.safetensors is damaged, or no checkpoint: .*Nothing was changed"):
        api.load(file, nn.Linear(1, 1))


@pytest.mark.parametrize("error", [
    MemoryError("of Python"), torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
])  # fmt: skip
def test_where_memory_runs_out_a_checkpoint_is_not_called_damaged(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.save(tmp_path / "one", model=(model := _net()))

    def runs_out(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "load", runs_out)
    with pytest.raises(type(error), match=re.escape(str(error))):
        api.load(tmp_path / "one", model=model)


def test_only_folders_beside_a_checkpoint_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").touch()
    for name, number in (("one", math.nan), ("two", 7), ("three", math.inf)):
        (tmp_path / name).mkdir()
        (tmp_path / name / folder.MARKER).write_text(json.dumps({"files": {}, "number": number}))
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / folder.MARKER)
    looked, marker = [], folder.marker
    monkeypatch.setattr(folder, "marker", lambda path: looked.append(path.name) or marker(path))
    assert [path.name for path, _ in folder.inside(tmp_path)] == ["one", "three", "two"]
    assert sorted(looked) == ["one", "pipe", "three", "two"]


@pytest.mark.parametrize("said", ["[" * 100_000, "[]", "1", '{"files": [], "number": "x"}', '{"files": {"a": 1}}',
                                  '{"files": {}, "number": "x"}', '{"files": {}}'], ids=range(7))  # fmt: skip
def test_a_marker_that_is_none_is_said_in_a_sentence(tmp_path: Path, said: str) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / folder.MARKER).write_text(said)
    with pytest.raises((UsageError, FileNotFoundError), match="one"):
        api.load(tmp_path / "one", nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("full", "gone"), [(False, "rank-0.safetensors"), (False, "checkpoint.json"), (True, "model.safetensors")]
)
@pytest.mark.parametrize("cut", [False, True], ids=["gone", "cut"])
def test_a_checkpoint_that_lacks_a_file_is_damaged_and_no_other_models(
    tmp_path: Path, full: bool, gone: str, cut: bool
) -> None:
    model = nn.Linear(4, 1)
    api.save(tmp_path / "ours", model=model, full=full)
    before = model.weight.detach().clone()
    file = tmp_path / "ours" / gone
    if cut:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.unlink()
    with pytest.raises(UsageError, match=r"is damaged|no whole checkpoint\.json"):
        api.load(tmp_path / "ours", model=model)
    assert torch.equal(model.weight, before)
