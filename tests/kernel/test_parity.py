"""Whatever the strategy and its options, the weights are those that one process gets: in fp32, to 1e-5.

One model has much of what makes this hard: AdamW with two groups and a state from before, a schedule, active clipping,
accumulation, a tied embedding, a frozen layer, a method of its own that trains; two cells of eight steps, 2 and 4
ranks, weights, optimizer state and learning rates compared after each cell. Then the lines of tests/lines, under other
strategies than ddp. What a strategy cannot do is one error that names it and one that can; REFUSES says what that is.

`make verify` plays a sample of the variants (variants.py) that SEED draws (default 0): on 2 devices of each strategy
its defaults and one more, each in one of the two ways, on 4 devices one variant of five of them; and each line under
one variant of one strategy. What compiles something first is left out. `make parity` plays all of it: every variant in
both ways on 2 and on 4 devices, every line under every variant (PARITY=all).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nbtrain.machine import registry
from nbtrain.strategies.base import share_of
from tests.lines import NEW, START, Line, everything
from tests.lines.alone import LINES, check_numbers, got_alone
from tests.lines.playing import Ranks, kernel_of
from tests.support.bench import rank_info
from tests.support.cards import CARDS, NOT_ON_CARDS, ON_CARDS
from tests.support.kernels import Error
from tests.support.variants import EVERYTHING, SEED, Variant, exact, sample

pytestmark = pytest.mark.kernel
WORLDS = (2, 4)
SLOW = 40 if not ON_CARDS else 100
"""Seconds after which a cell hangs."""


REFUSES: Mapping[str, frozenset[str]] = {
    "dp": frozenset(),
    "ddp2": frozenset(
        {
            "iterable data that each rank splits by itself",
            "validation on rank 0 only, as that error says",
        }
    ),
    "fsdp": frozenset(
        {
            "averages of models that are made one after another",
            "detect_anomaly and a hook on a tensor and a parameter",
            "gradient penalty",
            "lazy layers, which get their shape in the cell",
            "parameters updated from autograd.grad by hand, without an optimizer",
            "torch.save on rank 0",
            "validation on rank 0 only, as that error says",
        }
    ),
    "pipeline": frozenset(
        {
            "AveragedModel and update_bn",
            "EMA by deepcopy",
            "GAN",
            "LBFGS with a closure that returns its own rank's loss",
            "SyncBatchNorm: the statistics of the whole batch",
            "a GradScaler made in the cell, without unscale_",
            "a loss of nothing on one rank",
            "a model made in the cell after manual_seed, trained by hand without an optimizer",
            "add_param_group in the cell",
            "add_param_group in the cell, of a model that was captured",
            "add_param_group of a layer made in the cell, without setup",
            "an optimizer for each parameter, stepped while the backward goes on",
            "autocast and a GradScaler that skips steps",
            "averages of models that are made one after another",
            "clip_grad_norm_ imported by name before, clip_grad_value_, get_total_norm",
            "gradient penalty",
            "gradients kept: zero_grad(set_to_none=False)",
            "gradients looked at and edited by hand",
            "iterable data that each rank splits by itself",
            "lazy layers, which get their shape in the cell",
            "models made and copied in a loop, each trained by a function",
            "one optimizer for two models and a loose parameter",
            "parameters updated by hand",
            "parameters updated from autograd.grad by hand, without an optimizer",
            "torch.save on rank 0",
            "update_bn counts the batches of all ranks",
            "validation on rank 0 only, as that error says",
        }
    ),
    "deepspeed": frozenset(
        {
            "LBFGS with a closure that returns its own rank's loss",
            "a GradScaler made in the cell, without unscale_",
            "autocast and a GradScaler that skips steps",
            "checkpointed layers",
            "clip_grad_norm_ imported by name before, clip_grad_value_, get_total_norm",
            "frozen, then thawed, with unused parameters",
            "gradient penalty",
            "gradients kept: zero_grad(set_to_none=False)",
            "gradients looked at and edited by hand",
            "learning rates by hand, and a scheduler for each batch",
            "one forward, two backwards",
            "one optimizer for two models and a loose parameter",
            "parameters updated by hand",
            "several forwards, several backwards",
        }
    ),
}
"""Names of lines that a strategy may refuse. One that is not here may refuse what it likes, if it says so well."""

ONE_OF_OURS = r"(?i)(--strategy |the strategy |under |-s )({})\b"


def well_refused(error: Error, strategy: str) -> bool:
    """By one clear sentence that names the strategy, and a block of complete tensors or a strategy that can do it."""
    others = "|".join(name for name in registry.STRATEGIES if name != strategy)
    return (
        error.ename in ("NotSupported", "UsageError")
        and strategy in error.evalue.lower()
        and ("with whole(" in error.evalue or re.search(ONE_OF_OURS.format(others), error.evalue) is not None)
    )


# --- one model, everything at once ---------------------------------------------------------------


def combinations() -> list[tuple[int, str, Variant]]:
    """Devices, way and variant, in the order in which kernels are had."""
    if EVERYTHING:
        return [(world, way, one) for world in WORLDS for one in exact(world) for way in everything.WAYS]
    draw, found = random.Random(SEED), []
    for world, more in zip(WORLDS, (1, 0), strict=True):
        variants = exact(world)
        strategies = [*dict.fromkeys(one.strategy for one in variants)]
        for name in strategies if more else draw.sample(strategies, min(5, len(strategies))):
            plain, *others = [one for one in variants if one.strategy == name]
            played = [plain, *sample(others, draw, more)] if more else sample([plain, *others], draw)
            found += [
                (world, way, one) for way, one in zip(draw.sample([*everything.WAYS], len(played)), played, strict=True)
            ]
    return found


@pytest.fixture(scope="module")
def played() -> Iterator[Ranks]:
    """The notebook in which one process has gone before: what it got is in `alone`, by way."""
    with kernel_of(everything.START) as ranks:
        ranks.notebook("alone = {}; reduce = float")
        for way, (_, _, cell) in everything.WAYS.items():
            ranks.notebook(everything.ANEW)
            ranks.notebook(cell + f"\nalone[{way!r}] = [{everything.TELL}]")
            ranks.notebook(cell + f"\nalone[{way!r}].append({everything.TELL})")
            if "norms" in cell:
                ranks.notebook("assert min(norms) > 0.3, norms")  # else nothing is clipped
        ranks.notebook("del reduce")
        yield ranks


@pytest.mark.sample(*(f"2-*-{strategy}" for strategy in registry.STRATEGIES))
@pytest.mark.parametrize(("world", "way", "variant"), combinations(), ids=str)
def test_everything_at_once(played: Ranks, world: int, way: str, variant: Variant) -> None:
    notebook = played.notebook
    flags, cell, _ = everything.WAYS[way]
    notebook(everything.ANEW)
    for number in range(2):
        line = f"%%distributed {variant.line} --devices {world} {CARDS} --split-batches {flags}"
        run = played.cell(f"{line}\n{cell}", 300 if variant.compiles else SLOW)
        assert run.error is None, run.text[-3000:]
        assert "differs from rank" not in run.text
        notebook(everything.UNTOUCHED)
        shown = notebook(
            f"found, wanted = {everything.TELL}, alone[{way!r}][{number}]\n"
            f"assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()\n"
            f"far = {{at: float((found[at] - value).abs().max()) for at, value in wanted.items() if value.numel()}}\n"
            f"print({{at: d for at, d in far.items() if not d <= {everything.ACCURACY}}})"
        )
        assert shown.text.strip() == "{}", f"after cell {number + 1}: {shown.text}\n{run.text}"


# --- the lines people write anyway ---------------------------------------------------------------


def lines_played() -> list[tuple[Variant, Line]]:
    """ddp's own are in test_lines."""
    variants = [one for one in exact(2) if one.strategy != "ddp"]
    if EVERYTHING:
        return [(one, line) for one in variants for line in LINES if has_a_meaning(one, line)]
    draw = random.Random(SEED)
    return [(draw.choice([one for one in sample(variants, draw) if has_a_meaning(one, line)]), line) for line in LINES]


DEALT = frozenset(
    {
        "a loss of nothing on one rank",
        "a seed for validation only, within fork_rng",
    }
)
"""What is said, or different, in these is so because each rank sees a share of the batches."""


def has_a_meaning(variant: Variant, line: Line) -> bool:
    """What is refused, said or different because there are several ranks is not so where one has all the devices."""
    entry = registry.strategy(variant.strategy)
    several = line.refused or line.says or line.alone
    refused = line.name in REFUSES.get(variant.strategy, ())
    dealt = refused or line.name not in DEALT or shares(variant, 2) > 1
    return dealt and not (several and entry.needs.together)


def shares(variant: Variant, ranks: int) -> int:
    """Of the batches, on so many."""
    strategy = registry.make_strategy(variant.strategy, {}, {})
    strategy.place = rank_info(0, ranks, nodes=variant.nodes)
    return share_of(strategy, 0, ranks)[1]


@pytest.fixture(scope="module")
def lines() -> Iterator[Ranks]:
    with kernel_of(START) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return got_alone(request, tmp_path_factory.mktemp("alone"))


@pytest.mark.sample(first=4)
@pytest.mark.limit(300)
@pytest.mark.parametrize(("variant", "line"), lines_played(), ids=lambda one: str(getattr(one, "name", one)))
def test_line(lines: Ranks, alone: dict[str, Any], tmp_path: Path, variant: Variant, line: Line) -> None:
    if ON_CARDS and (why := NOT_ON_CARDS.get(line.name)):
        pytest.skip(why)
    notebook = lines.notebook
    notebook(NEW + line.before)
    run = lines.cell(
        f"%%distributed {variant.line} --devices 2 {CARDS} {line.flags}\n{line.cell}", 300 if variant.compiles else SLOW
    )
    if line.refused:  # under every strategy
        assert run.error is not None, f"this should have been refused:\n{line.cell}"
        said = f"{run.error.ename}: {run.error.evalue}"
        assert re.search(line.refused, said) or well_refused(run.error, variant.strategy), run.text[-3000:]
        return
    if run.error is not None:
        assert well_refused(run.error, variant.strategy), run.text[-3000:]
        allowed = REFUSES.get(variant.strategy)
        assert allowed is None or line.name in allowed, run.text[-3000:]
        return
    assert "differs from rank" not in run.text
    assert line.says in run.text
    check_numbers(notebook, line, alone, tmp_path)
