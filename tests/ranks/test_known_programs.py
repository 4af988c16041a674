"""Programs that everybody knows, under every strategy: what one process makes of the whole batch, or a sentence.

Each file of tests/programs/known is a notebook in cells, written anew in the manner of the program that it names, and
ends with a `result`: weights, states of optimizers, metrics. One process plays it, and two ranks of every strategy that
split each batch; a strategy has one notebook, whose ranks are warm from the second program on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from nbtrain.machine import registry
from tests.fuzz.player import Played, Player
from tests.fuzz.verdicts import judge

HERE = Path(__file__).parents[1] / "programs" / "known"
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py"))
STRATEGIES = [
    name
    for name in (
        "ddp", "zero1", "sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "pipeline",
        "dp", "ddp2", "horovod",
    )
    if all(map(find_spec, registry.strategy(name.split("_")[0]).needs.packages))
]  # fmt: skip

SUMS = r"the loss is a sum over the samples"
SAID: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vae": ((SUMS,), ("ddp", "zero1", "sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2",
                      "deepspeed_stage_3", "horovod")),
}  # fmt: skip
"""program → sentences by which its numbers are not those of one process, and the strategies that say them"""
REFUSED: dict[tuple[str, str], str] = {
    ("wgan_gp", "fsdp"): r"create_graph=True.*--strategy ddp can",
    ("wgan_gp", "deepspeed_stage_3"): r"gradient penalties \(create_graph\).*under the strategy ddp",
    ("wgan_gp", "pipeline"): r"create_graph=True.*Use --strategy ddp",
}
"""(program, strategy) → the sentence"""


def cells(program: str) -> list[tuple[bool, str]]:
    """(whether it is distributed, its code) of every cell."""
    parts = (HERE / f"{program}.py").read_text().split("# %%")[1:]
    titled = [part.split("\n", 1) for part in parts]
    return [(title.strip() == "distributed", code.strip("\n") + "\npass") for title, code in titled]


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, list[Played]]]:
    """What one process makes of each."""
    with Player("") as player:
        yield {program: player.play(cells(program)) for program in PROGRAMS}


def test_one_process_plays_them(alone: dict[str, list[Played]]) -> None:
    for program, story in alone.items():
        assert story[-1].error is None, (program, story[-1].error)
        assert any(path.startswith("result") for path in story[-1].held), program
        assert any(cell.distributed for cell in story), program


@pytest.mark.thorough
@pytest.mark.limit(240)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_known_programs(strategy: str, alone: dict[str, list[Played]]) -> None:
    failures = []
    with Player(strategy) as ranks:
        for program in PROGRAMS:
            story = ranks.play(cells(program))
            if why := amiss(program, strategy, alone[program], story):
                failures.append(f"{program}: {why}")
    assert not failures, "\n\n".join(failures)


def amiss(program: str, strategy: str, alone: list[Played], ranks: list[Played]) -> str:
    """What is wrong with it; empty if it is as it should be."""
    found = judge(alone, alone, ranks)
    wanted, sentences = "right", []
    if refusal := REFUSED.get((program, strategy)):
        wanted, sentences = "refused", [refusal]
    elif program in SAID and strategy in SAID[program][1]:
        wanted, sentences = "said", [*SAID[program][0]]
    shown = " ".join(f"{found.why} {' '.join(cell.shown for cell in ranks)}".split())
    if found.word == wanted and all(re.search(one, shown) for one in sentences):
        return ""
    return f"{found.word}, and not {wanted} {sentences}: {shown[:1500]}"
