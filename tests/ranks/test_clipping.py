"""`clip_grad_norm_` with every argument, over one model and over two: under every strategy the norms and the models of
one process, or a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NbtrainError
from nbtrain.machine import registry
from tests.support.absent import absent
from tests.support.bench import Bench
from tests.support.models import net, samples_of
from tests.support.ranks import run_on_ranks, without_group

pytestmark = pytest.mark.limit(300)

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ddp", "ddp2", "zero1", "sharded", "fsdp", "pipeline", "horovod")},
    **{f"deepspeed {stage}": ("deepspeed", {"stage": stage}) for stage in (1, 2, 3)},
}
DEEPSPEED = tuple(name for name in STRATEGIES if name.startswith("deepspeed"))
LOOKED_AT = dict.fromkeys(("sharded", *DEEPSPEED), "a gradient was looked at or edited")

Parameters = list[nn.Parameter]
Clip = Callable[[Parameters, Parameters], Any]
"""what the loop writes between the backwards of two models and their steps"""


def one_then_the_other(*args: Any, **kwargs: Any) -> Clip:
    return lambda a, b: [nn.utils.clip_grad_norm_(a, *args, **kwargs), nn.utils.clip_grad_norm_(b, *args, **kwargs)]


def both(*args: Any, **kwargs: Any) -> Clip:
    return lambda a, b: [nn.utils.clip_grad_norm_([*a, *b], *args, **kwargs)]


def some(*args: Any, **kwargs: Any) -> Clip:
    return lambda a, b: [nn.utils.clip_grad_norm_([*a[:2], *b[-1:]], *args, **kwargs)]


def by_two_functions(a: Parameters, b: Parameters) -> list[torch.Tensor]:
    norm = nn.utils.get_total_norm([p.grad for p in (*a, *b)])
    nn.utils.clip_grads_with_norm_([*a, *b], 0.1, norm)
    return [norm]


def by_given_norm(a: Parameters, b: Parameters) -> list[torch.Tensor]:
    nn.utils.clip_grads_with_norm_([*a, *b], 0.1, torch.tensor(2.0))
    return []


def by_value(a: Parameters, b: Parameters) -> list[torch.Tensor]:
    nn.utils.clip_grad_value_([*a, *b], 0.01)
    return []


def counted(a: Parameters, b: Parameters) -> list[torch.Tensor]:
    """The norm 0 counts gradients that are not all zero; the last layer's are, where all targets are alike."""
    return [nn.utils.clip_grad_norm_(a, 3.0, 0), nn.utils.clip_grad_norm_([*a, *b], 3.0, norm_type=0)]


def least(norm_type: float) -> Clip:
    """Norms that the smallest gradients decide: of few, so that rounding does not."""

    def clip(a: Parameters, b: Parameters) -> list[torch.Tensor]:
        some = [a[0], a[-1], b[0], b[-1]]
        return [nn.utils.clip_grad_norm_(few, 1e-4, norm_type) for few in (some[:2], some)]

    return clip


def no_norm(a: Parameters, b: Parameters) -> list[torch.Tensor]:
    with pytest.raises(TypeError):
        nn.utils.clip_grad_norm_(a, 0.1, norm_type=None)  # type: ignore[arg-type]
    return []


ROWS: dict[str, tuple[Clip, dict[str, str]]] = {
    "one model": (one_then_the_other(0.1), {}),
    "two models": (both(0.1), {}),
    "two models, only the norm": (both(math.inf), {}),
    "some of two models": (some(0.05), {}),
    "all arguments by keyword": (
        lambda a, b: [
            nn.utils.clip_grad_norm_(parameters=a, max_norm=0.1, norm_type=2.0, error_if_nonfinite=True, foreach=True)
        ],
        {},
    ),
    "norm 0": (counted, {}),
    "norm 0.5 of two": (both(0.1, 0.5), {}),
    "norm 1 of two": (both(0.1, norm_type=1), {}),
    "norm inf": (one_then_the_other(0.01, math.inf), {}),
    "norm -inf": (least(-math.inf), {}),
    "norm -1": (least(-1.0), {}),
    "norm None, which is torch's error": (no_norm, {}),
    "a gradient twice": (
        lambda a, b: [nn.utils.clip_grad_norm_([*a, *a[:2]], 0.1)],
        {},
    ),
    "by value": (
        by_value,
        {"sharded": "clip_grad_value_: under sharded", **dict.fromkeys(DEEPSPEED, "clip_grad_value_: DeepSpeed")},
    ),
    "get_total_norm and clip_grads_with_norm_": (by_two_functions, LOOKED_AT),
    "clip_grads_with_norm_ alone": (by_given_norm, LOOKED_AT),
}
NOT_FINITE: dict[str, Clip] = {
    "norm inf of two models": lambda a, b: nn.utils.clip_grad_norm_([*a, *b], 0.1, math.inf, error_if_nonfinite=True),
    "one model": lambda a, b: nn.utils.clip_grad_norm_(a, 0.1, error_if_nonfinite=True),
    "two models": lambda a, b: nn.utils.clip_grad_norm_([*a, *b], 0.1, 2.0, True),
}


def played(bench: Bench) -> dict[str, Any]:
    """Each row in a cell of its own: the norms, and the models' outputs after the steps; or what was raised."""
    found: dict[str, Any] = {}
    for name, (clip, _) in ROWS.items():
        found[name] = _row(bench, clip)
    for name, clip in NOT_FINITE.items():
        found[f"not finite: {name}"] = _not_finite(bench, clip)
    return found


def _models() -> dict[str, Any]:
    a, b = net(1), net(2)
    for model in (a, b):
        del model.spare  # gets no gradient, with which DeepSpeed does something of its own
    return {"a": a, "b": b, "of_a": torch.optim.SGD(a.parameters(), 0.5), "of_b": torch.optim.SGD(b.parameters(), 0.5)}


def _row(bench: Bench, clip: Clip) -> Any:
    made = _models()
    a, b, of_a, of_b = made.values()
    norms: list[float] = []
    outputs: list[torch.Tensor] = []

    def loop() -> None:
        for x, y in bench.loader(16):
            F.cross_entropy(a(x), y).backward()
            (3 * F.cross_entropy(b(x), y)).backward()
            norms.extend(float(norm) for norm in clip([*a.parameters()], [*b.parameters()]))
            for optimizer in (of_a, of_b):
                optimizer.step()
                optimizer.zero_grad()
        outputs.extend(_outputs(a, b))

    try:
        bench.cell(loop, **made)
    except NbtrainError as error:
        return str(error)
    return norms, outputs


def _outputs(*models: nn.Module) -> list[torch.Tensor]:
    """What all weights have a part in, and every rank has."""
    x = samples_of(24).tensors[0]
    with torch.no_grad():
        return [model(x) for model in models]


def _not_finite(bench: Bench, clip: Clip) -> Any:
    """One model's gradients are infinite. The loop catches what is raised, and steps the other."""
    made = _models()
    a, b, of_a, of_b = made.values()
    said: list[str] = []
    outputs: list[torch.Tensor] = []

    def loop() -> None:
        x, y = next(iter(bench.loader()))
        (F.cross_entropy(a(x), y) * math.inf).backward()
        F.cross_entropy(b(x), y).backward()
        try:
            clip([*a.parameters()], [*b.parameters()])
        except (RuntimeError, NbtrainError) as error:
            said.append(f"{type(error).__name__}: {error}")
        of_a.zero_grad()
        of_b.step()
        outputs.extend(_outputs(b))

    bench.cell(loop, **made)
    return said, outputs


def _on_rank(rank: int, strategy: str) -> dict[str, Any]:
    name, options = STRATEGIES[strategy]
    return Bench(rank, 2, registry.make_strategy(name, options, {})).play(played)


def _alone(rank: int) -> dict[str, Any]:
    return Bench().play(played)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    [found] = run_on_ranks(without_group, _alone, world_size=1)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=STRATEGIES)
def ranks(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    strategy = request.param
    packages = registry.strategy(strategy.split()[0]).needs.packages
    if not all(map(find_spec, packages)):
        absent(f"{packages} are not installed", f"pip install {' '.join(packages)}")
    if strategy in DEEPSPEED:
        from nbtrain.strategies.deepspeed.library import imported

        imported(torch.device("cpu"))
    return strategy, run_on_ranks(_on_rank, strategy, timeout=240)


@pytest.mark.sample("ddp-*", "zero1-*")
@pytest.mark.parametrize("row", ROWS)
def test_is_that_of_one_process_or_a_sentence(
    row: str, ranks: tuple[str, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    strategy, found = ranks
    sentence = ROWS[row][1].get(strategy)
    norms, outputs = alone[row]
    for one in found:
        if sentence is not None:
            assert isinstance(one[row], str), "it was not refused"
            assert sentence in one[row]
            continue
        assert not isinstance(one[row], str), one[row]
        assert one[row][0] == pytest.approx(norms, rel=1e-3)
        torch.testing.assert_close(one[row][1], outputs, rtol=1e-3, atol=1e-4)


@pytest.mark.sample("ddp-*", "zero1-*", "fsdp-*")
@pytest.mark.parametrize("row", NOT_FINITE)
def test_torchs_error_is_raised_on_every_rank_before_anything_is_scaled(
    row: str, ranks: tuple[str, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    _, found = ranks
    said, outputs = alone[f"not finite: {row}"]
    assert said[0].startswith("RuntimeError: The total norm of order")
    for one in found:
        assert one[f"not finite: {row}"][0] == said
        torch.testing.assert_close(one[f"not finite: {row}"][1], outputs, rtol=1e-3, atol=1e-4)


def test_only_the_sum_of_accumulated_batches_is_to_be_finite() -> None:
    """In the middle of a group nothing is raised: there ranks have their own gradients, and one alone would raise."""
    bench = Bench()
    made = _models()
    a, _, of_a, _ = made.values()
    raised: list[int] = []

    def program(bench: Bench) -> None:
        def loop() -> None:
            for i, (x, y) in enumerate(bench.loader(16, 8)):
                (F.cross_entropy(a(x), y) * math.inf).backward()
                try:
                    nn.utils.clip_grad_norm_(a.parameters(), 0.1, error_if_nonfinite=True)
                except RuntimeError:
                    raised.append(i)
            of_a.zero_grad()

        bench.cell(loop, accumulate=2, a=a, of_a=of_a)

    bench.play(program)
    assert raised == [1]
