"""Stop at moments that are drawn, over the loops that people write: nothing is lost, and nothing is half done.

After each the notebook is exactly at the step that it was told, and the next cell works on ranks that agree. A second
press, a moment later, may also leave the notebook as it was. SEED draws the moments; `make faults` (FAULTS=all) plays
PRESSES of them, `make verify` a few.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import pytest

from tests.faults.scene import COMBINATIONS, Combination, Scene, announced

SEED = int(os.environ.get("SEED", "0"))
PRESSES = 200 if os.environ.get("FAULTS") == "all" else 8
pytestmark = [pytest.mark.kernel, pytest.mark.limit(180)]

STEPS = 150
PAUSE = 0.008
"""Seconds between two steps: a cell goes on for more than one, and a drawn moment strikes anywhere in a step."""

PLAIN = f"""
for x, y in itertools.islice(loader, {STEPS}):
    F.cross_entropy(model(x), y).backward(); opt.step(); sched.step(); opt.zero_grad()
    mark()
"""

GAN = f"""
for x, _ in itertools.islice(loader, {STEPS}):
    real = torch.ones(len(x), 1)
    fake = maker(x[:, :3])
    loss = wrong(judge(x), real) + wrong(judge(fake.detach()), 0 * real)
    judge_opt.zero_grad(); loss.backward(); judge_opt.step(); judge_opt.zero_grad()
    loss = wrong(judge(fake), real)
    loss.backward(); maker_opt.step(); maker_opt.zero_grad(); judge_opt.zero_grad()
    mark()
"""
TWO = """
wrong = F.binary_cross_entropy_with_logits
maker, judge = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
maker_opt, judge_opt = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters(), 0.1)
world.update(maker=maker, judge=judge, maker_opt=maker_opt, judge_opt=judge_opt)
"""

ACCUMULATED = f"""
for i, (x, y) in enumerate(itertools.islice(loader, {STEPS}), 1):
    (F.cross_entropy(model(x), y) / 3).backward()
    time.sleep(0 if recording else pause)
    if i % 3 == 0:
        opt.step(); sched.step(); opt.zero_grad()
        mark()
"""

SCALED = f"""
for i, (x, y) in enumerate(itertools.islice(loader, {STEPS}), 1):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y) * (float("inf") if i % 4 == 0 else 1.0)
    scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); opt.zero_grad()
    mark(taken=int(i % 4 != 0))
"""
SCALER = "scaler = torch.amp.GradScaler('cpu', init_scale=64.0, growth_interval=7); world['scaler'] = scaler"

CLOSURES = f"""
for x, y in itertools.islice(loader, {STEPS}):
    def closure():
        slow.zero_grad(); loss = F.cross_entropy(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss
    slow.step(closure); slow.zero_grad()
    mark()
"""
LBFGS = "slow = torch.optim.LBFGS(model.parameters(), 0.05, max_iter=4); world['slow'] = slow"

NO_LOADER = f"""
for i in range({STEPS}):
    part = slice(4 * i, 4 * i + 4)
    F.cross_entropy(model(X[part]), Y[part]).backward(); opt.step(); sched.step(); opt.zero_grad()
    mark()
"""

BY_HAND = f"""
for x, y in itertools.islice(loader, {STEPS}):
    loss = F.cross_entropy(model(x), y)
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        p.data -= 0.05 * g
    time.sleep(pause)
"""

EVALUATED = f"""
with torch.no_grad():
    for x, y in itertools.islice(loader, {STEPS}):
        right = (model(x).argmax(1) == y).sum().item()
        time.sleep(pause)
"""

CELLS = {
    "a loop": (PLAIN, ""),
    "two optimizers": (GAN, TWO),
    "accumulation": (ACCUMULATED, ""),
    "a scaler that skips": (SCALED, SCALER),
    "closures of LBFGS": (CLOSURES, LBFGS),
    "no loader": (NO_LOADER, ""),
    "no optimizer": (BY_HAND, ""),
    "evaluation": (EVALUATED, ""),
}
STEPLESS = ("no optimizer", "evaluation")
"""They end wherever they are, since nothing says what a step is."""
REFUSED = {
    *((strategy, "no optimizer") for strategy in ("ddp", "fsdp")),
    *((strategy, "closures of LBFGS") for strategy in ("ddp", "fsdp", "deepspeed")),
    ("deepspeed", "a scaler that skips"),
    ("sharded", "a scaler that skips"),
}


@dataclass(frozen=True, slots=True)
class Press:
    cell: str
    moment: float
    """seconds after the cell's first word"""
    again: float | None
    """and so many after that, if at all"""

    def __str__(self) -> str:
        twice = f"-and-{self.again:.3f}" if self.again is not None else ""
        return f"{self.cell.replace(' ', '-')}-{self.moment:.3f}{twice}"


def drawn() -> list[tuple[Combination, Press]]:
    """What is played, in the order in which kernels are had."""
    draw = random.Random(SEED)
    if PRESSES > 100:
        combinations = COMBINATIONS
    else:  # two kernels, since each takes its time to start: one that brings home from one rank, one from all
        by_kind = [[one for one in COMBINATIONS if one.in_pieces is in_pieces] for in_pieces in (False, True)]
        combinations = [draw.choice(ones) for ones in by_kind]
    played = []
    for number in range(PRESSES):
        combination = combinations[number % len(combinations)]
        cell = draw.choice([name for name in CELLS if (combination.strategy, name) not in REFUSED])
        again = draw.uniform(0, 0.3) if draw.random() < 0.3 else None
        played.append((combination, Press(cell, draw.uniform(0, 1.3), again)))
    return sorted(played, key=lambda one: COMBINATIONS.index(one[0]))


@pytest.mark.sample(first=1)
@pytest.mark.parametrize(("open_scenes", "press"), drawn(), indirect=["open_scenes"], scope="module", ids=str)
def test_stop(scene: Scene, press: Press) -> None:
    body, extra = CELLS[press.cell]
    body = "print('begun')\n" + body
    scene.trajectory(body, extra=extra)  # leaves a new world, with `extra`
    scene.notebook(f"pause = {PAUSE}")
    result = scene.begin(body)
    scene.kernel.wait_for(lambda: "begun" in result.text, 30)
    pids = [process.pid for process in scene.ranks_now()]
    time.sleep(press.moment)
    scene.stop()
    if press.again is not None:
        time.sleep(press.again)
        scene.stop()
    scene.kernel.wait(result, 30)
    if result.error is not None:
        assert result.error.ename == "KeyboardInterrupt", result.text
        assert announced(result.error) is not None or press.again is not None, result.text
    if press.again is None:
        assert pids == [process.pid for process in scene.ranks_now()], f"ranks were lost\n{result.text}"
    if press.cell in STEPLESS:
        scene.check_works(result.text)
        return
    scene.check_after(result, body)
