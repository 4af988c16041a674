"""What is done about memory without being asked: `auto` leaves ddp where a model does not fit under it, and the error
of a cell that ran out of memory names what needs less."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.annexes.planning import auto_strategy
from nbtrain.annexes.planning.auto_strategy import advise
from nbtrain.annexes.planning.oom_advice import instead
from nbtrain.annexes.planning.plan import guide
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.machine import host
from nbtrain.notebook.report.oom_report import LESS
from tests.support.planned import PLANNED

FOUR = RunSpec(pool=PoolSpec(devices=("cpu",) * 4), strategy="ddp", chosen=True)


def reads(*names: str) -> Captured:
    return Captured(hard=names, soft=(), writes=frozenset(), opaque=False)


@pytest.fixture(autouse=True)
def steady_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free changes while other tests run beside these, and with it what is said."""
    now = host.memory()
    monkeypatch.setattr(host, "memory", lambda: now)


def of_size(share: float) -> dict[str, Any]:
    """A model and its optimizer, whose weights would take so much of the memory that is free. It has none of it."""
    width = int((share * host.memory().available / 4 / 8) ** 0.5)
    net = nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(8)))
    return {"net": net, "optimizer": torch.optim.Adam(net.parameters())}


def test_one_that_does_not_fit_gets_what_the_guide_names_and_keeps_it() -> None:
    notebook = of_size(0.1)  # with what belongs to it 0.4, four times; divided it is 0.4 and a gathered layer each
    run, said = advise(reads(*notebook), notebook, FOUR)
    assert run.strategy != "ddp"
    assert replace(run, strategy="ddp", options={}) == FOUR
    assert guide.place(run.strategy) is not None or run.options
    assert re.match(r"auto: without its activations, net takes \S+ GB per rank under ddp, and there is room for ", said)
    assert "--strategy ddp uses ddp anyway" in said
    assert advise(reads(*notebook), notebook, FOUR) == (run, ""), "it is said once, and then kept"
    assert advise(reads("net"), notebook, FOUR) == (run, "")


@pytest.mark.parametrize("share", [0.1, 0.03, 3], ids=["another strategy", "ddp", "nothing fits"])
def test_it_plans_once_for_a_model_and_a_pool(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []

    def counted(*given: Any) -> Any:
        plans.append(given)
        return plan(*given)

    plan = auto_strategy.planned
    monkeypatch.setattr(auto_strategy, "planned", counted)
    notebook = of_size(share)
    first, _ = advise(reads(*notebook), notebook, FOUR)
    assert len(plans) == 1
    for cell in (reads(*notebook), reads("net"), reads(*notebook)):
        assert advise(cell, notebook, FOUR) == (first, "")
    assert len(plans) == 1, "nothing has changed"
    eight = replace(FOUR, pool=PoolSpec(devices=("cpu",) * 8))
    advise(reads(*notebook), notebook, eight)
    assert len(plans) == 2, "another pool"
    advise(reads(*notebook), notebook, eight)
    assert len(plans) == 2
    width = notebook["net"][0].in_features
    notebook["net"].append(nn.Linear(width, width, device="meta"))
    notebook["optimizer"] = torch.optim.Adam(notebook["net"].parameters())
    advise(reads(*notebook), notebook, eight)
    assert len(plans) == 3, "the model has grown"


def test_a_plan_that_fails_is_not_made_again_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []

    def fails(*given: Any) -> Any:
        tries.append(given)
        raise RuntimeError("no driver")

    monkeypatch.setattr(auto_strategy, "planned", fails)
    notebook = of_size(0.1)
    for _ in range(2):
        assert advise(reads(*notebook), notebook, FOUR) == (FOUR, "")
    assert len(tries) == 1


def test_where_a_cell_is_only_tried_nothing_is_remembered() -> None:
    notebook = of_size(0.1)
    names = reads(*notebook)
    tried, said = advise(names, notebook, FOUR, keep=False)
    assert tried.strategy != "ddp"
    assert said
    assert advise(reads("net"), notebook, FOUR) == (FOUR, ""), "nothing was chosen for it"
    run, again = advise(names, notebook, FOUR)
    assert (run, again) == (tried, said)
    assert advise(names, notebook, FOUR, keep=False) == (run, ""), "what was chosen counts for trials"


class Wraps(torch.optim.Optimizer):
    """Not as torch wants them to be."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


ONE = RunSpec(pool=PoolSpec(devices=("cpu",)), strategy="single", chosen=True)


@pytest.mark.parametrize(("share", "names", "run"), [
    (0.01, ("net", "optimizer"), FOUR),  # it fits
    (3, ("net", "optimizer"), FOUR),  # nothing fits
    (0.1, ("net", "wrapped"), FOUR),  # what steps it cannot be looked at
    (0.1, ("other",), FOUR),  # the cell does not read it
    (0.1, ("net",), FOUR),  # without its optimizer it is not trained
    (0.1, ("net", "optimizer"), replace(FOUR, chosen=False)),  # the user has chosen
    (0.1, ("net", "optimizer"), replace(FOUR, options={"bucket_mb": 5})),
    (0.1, ("net", "optimizer"), ONE),
])  # fmt: skip
def test_where_there_is_nothing_to_advise_the_run_stays(share: float, names: tuple[str, ...], run: RunSpec) -> None:
    notebook = of_size(share)
    notebook["wrapped"] = Wraps(notebook["optimizer"])
    if "wrapped" in names:
        del notebook["optimizer"]
    assert advise(reads(*names), notebook, run) == (run, "")


def test_of_layers_without_a_size_the_others_count() -> None:
    notebook = of_size(0.1)
    notebook["net"].append(nn.LazyLinear(4))
    notebook["optimizer"] = torch.optim.Adam(notebook["net"].parameters())
    assert advise(reads(*notebook), notebook, FOUR)[0].strategy != "ddp"
    small = nn.Sequential(nn.LazyLinear(4))
    notebook = {"net": small, "optimizer": torch.optim.SGD(small.parameters(), 0.1)}
    assert advise(reads(*notebook), notebook, FOUR) == (FOUR, "")


def test_what_was_chosen_for_a_model_does_not_keep_it_alive() -> None:
    notebook = of_size(0.1)
    assert advise(reads(*notebook), notebook, FOUR)[1]
    gone = weakref.ref(notebook["net"])
    notebook.clear()
    gc.collect()
    assert gone() is None


def small() -> dict[str, Any]:
    net = PLANNED["transformer"].model(depth=6)
    return {
        "net": net,
        "optimizer": torch.optim.AdamW(net.parameters()),
        "batch": PLANNED["transformer"].batch(32),
        "other": 1,
    }


def test_the_plan_names_what_needs_less_and_repeats_what_was_typed() -> None:
    run = RunSpec(
        pool=PoolSpec(devices=("cpu",) * 2), strategy="ddp", precision="bf16-mixed", split_batches=True, hang_after=5.0,
        keep=("a", "b"), save_steps=50, sampler=False,
    )  # fmt: skip
    said = instead(reads("net", "optimizer", "batch"), small(), run)
    found = re.match(
        r"The plan for net: (.+) needs about (\S+) MB per rank instead of (\S+) MB: %%distributed (.+?)\. The largest "
        r"batch that fits: %%distributed (.+?) --find-batch\. ",
        said,
    )
    assert found is not None, said
    assert float(found[2]) < 0.75 * float(found[3])
    rest = "--devices 2 --precision bf16-mixed --split-batches --no-sampler --keep a,b --hang-after 5 --save-every 50"
    assert found[4].endswith(rest)
    assert found[4].startswith("--strategy ")
    assert found[5] == "--strategy ddp --devices 2 --precision bf16-mixed --split-batches --no-sampler"
    assert said.endswith(LESS)


def test_what_recomputes_already_is_told_something_else() -> None:
    run = RunSpec(pool=PoolSpec(devices=("cpu",) * 2), strategy="ddp", checkpoint_activations=("Block",))
    said = instead(reads("net", "optimizer", "batch"), small(), run)
    assert "The plan for net: ddp" not in said
    assert "%%distributed --strategy ddp --checkpoint-activations Block --devices 2 --find-batch" in said


def test_without_a_model_to_look_at_the_guide_knows() -> None:
    run = RunSpec(pool=PoolSpec(devices=("cpu",) * 2), strategy="zero1")
    said = instead(reads("other"), small(), run)
    assert re.match(
        r"\S+ needs less: it divides .+: %%distributed --strategy \S+ --devices 2\. The largest batch", said
    )
    alone = RunSpec(pool=PoolSpec(), strategy="single")
    assert instead(reads("other"), small(), alone).startswith(
        "The largest batch that fits: %%distributed --strategy single"
    )
