"""A loss that sums over a batch of which each rank has a share: told from any other by its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from nbtrain.base.events import Finished
from nbtrain.notebook.report.cell_report import work_advice
from nbtrain.worker.gradients.summed_losses import SummedLosses

BATCH = 6
MODEL = nn.Linear(4, 3)
OUT = MODEL(torch.rand(BATCH, 4))
Y, T = torch.arange(BATCH) % 3, torch.rand(BATCH, 3)
SUMS: dict[str, Callable[[], torch.Tensor]] = {
    "cross entropy": lambda: F.cross_entropy(OUT, Y, reduction="sum"),
    "a criterion": lambda: nn.MSELoss(reduction="sum")(OUT, T),
    "two terms": lambda: F.binary_cross_entropy(OUT.sigmoid(), T, reduction="sum") - 0.5 * torch.sum(1 + OUT),
    "by hand": lambda: (OUT - T).square().sum(1).sum(),
    "weighted": lambda: 0.1 * F.l1_loss(OUT, T, reduction="sum") + MODEL.weight.square().sum(),
}
NONE: dict[str, Callable[[], torch.Tensor]] = {
    "a mean": lambda: F.cross_entropy(OUT, Y),
    "sums of samples": lambda: (OUT - T).square().sum(1).mean(),
    "divided by the batch": lambda: F.cross_entropy(OUT, Y, reduction="sum") / len(Y),
    "a penalty": lambda: F.cross_entropy(OUT, Y) + 0.01 * MODEL.weight.square().sum(),
    "set right": lambda: F.cross_entropy(OUT, Y, reduction="sum") * 2,
    "no tensor of a graph": lambda: torch.zeros(()),
}


def found(loss: torch.Tensor, count: int) -> list[str]:
    summed = SummedLosses()
    summed.begin(count)
    if summed.due():
        summed.look(loss, BATCH, {p.shape for p in MODEL.parameters()})
    return summed.notes()


@pytest.mark.parametrize("name", SUMS)
def test_a_sum(name: str) -> None:
    (note,) = found(SUMS[name](), 2)
    assert "(loss * world_size).backward()" in note
    assert "1/2" in note
    assert found(SUMS[name](), 1) == []


def test_a_sum_divided_by_the_size_of_the_whole_batch() -> None:
    """It is one N-th of one process's where batches are split; where each rank has one of its own, it is right."""
    for divided in (12, torch.tensor(12.0)):
        for split in (True, False):
            summed = SummedLosses()
            summed.begin(2, split)
            summed.look(F.cross_entropy(OUT, Y, reduction="sum") / divided, BATCH, set())
            assert bool(summed.notes()) is split


ONES, LOSSES = torch.ones(BATCH), F.cross_entropy(OUT, Y, reduction="none")
BEGUN_WITH: dict[str, tuple[torch.Tensor, torch.Tensor, bool]] = {
    "ones": (LOSSES, ONES, True),
    "a mean": (LOSSES, ONES / BATCH, False),
    "divided before": (LOSSES / BATCH, ONES, False),
    "set right": (LOSSES * 2, ONES, False),
    "of a mean": (F.cross_entropy(OUT, Y), torch.tensor(1.0), False),
}


@pytest.mark.parametrize("name", BEGUN_WITH)
def test_losses_of_single_samples_are_summed_by_a_backward_that_begins_with_ones(name: str) -> None:
    loss, starts, told = BEGUN_WITH[name]
    summed = SummedLosses()
    summed.begin(2)
    assert summed.due()
    summed.look(loss, BATCH, {p.shape for p in MODEL.parameters()}, starts)
    assert bool(summed.notes()) is told


@pytest.mark.parametrize("name", NONE)
def test_no_sum(name: str) -> None:
    assert found(NONE[name](), 2) == []


def test_a_later_look_notices_what_turns_up_late() -> None:
    for first, told_of in ((8, True), (9, False)):
        ended = []
        for rank in range(2):
            summed = SummedLosses()
            summed.begin(2)
            for backward in range(1, 16):
                if summed.due():
                    y = PADDED[rank] if backward >= first else Y
                    summed.look(F.cross_entropy(OUT, y) + F.mse_loss(OUT, T), BATCH, set())
            ended.append(Finished(rank=rank, time=0.0, steps=1, compared=summed.divisors()))
        assert ("divisors" in work_advice(ended)) is told_of


def test_no_saved_tensor_of_a_mean_is_read() -> None:
    """A checkpoint would compute what is within it anew."""
    ran = []

    def loss(out: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return F.mse_loss(out * 2, T)

    found = torch.utils.checkpoint.checkpoint(loss, OUT, use_reentrant=False)
    summed = SummedLosses()
    summed.begin(2)
    assert summed.due()
    summed.look(found, BATCH, set())
    assert summed.divisors()
    assert len(ran) == 1


PADDED = torch.tensor([0, -100, 2, 0, -100, 2]), torch.tensor([0, 1, 2, 0, 1, -100])
MASKS = torch.tensor([1.0, 0, 1, 1, 0, 1]), torch.tensor([1.0, 1, 1, 1, 0, 1])
WEIGHTS = torch.tensor([1.0, 5, 0.2])
OF_ITS_OWN: dict[str, Callable[[int], torch.Tensor]] = {
    "ignored targets": lambda rank: F.cross_entropy(OUT, PADDED[rank]),
    "nll of ignored targets": lambda rank: F.nll_loss(OUT.log_softmax(1), PADDED[rank]),
    "class weights": lambda rank: F.cross_entropy(OUT, Y.roll(rank).clamp(max=1 + rank), weight=WEIGHTS),
    "a mask": lambda rank: (F.cross_entropy(OUT, Y, reduction="none") * MASKS[rank]).sum() / MASKS[rank].sum(),
    "a count": lambda rank: F.cross_entropy(OUT, PADDED[rank], reduction="sum") / int((PADDED[rank] >= 0).sum()),
    "smoothed, too": lambda rank: F.cross_entropy(OUT, Y.roll(rank).clamp(max=1 + rank), WEIGHTS, label_smoothing=0.1),
    "accumulated": lambda rank: F.cross_entropy(OUT, PADDED[rank]) / 4,
    "with a penalty": lambda rank: F.cross_entropy(OUT, PADDED[rank]) + 0.1 * MODEL.weight.square().sum(),
}
KEEP = torch.tensor([True, False, True, True, False, True]), torch.tensor([True, True, True, True, False, True])
PROBABILITIES = T / T.sum(1, keepdim=True)


def over(mean: Callable[..., torch.Tensor], **options: object) -> Callable[[int], torch.Tensor]:
    """A loss function's mean over the samples that a rank keeps."""
    return lambda rank: mean(OUT[KEEP[rank]], T[KEEP[rank]], **options)


OF_A_SELECTION: dict[str, Callable[[int], torch.Tensor]] = {
    "losses of samples": lambda rank: F.cross_entropy(OUT, Y, reduction="none")[KEEP[rank]].mean(),
    "squared": over(F.mse_loss),
    "absolute": over(F.l1_loss),
    "smooth": over(F.smooth_l1_loss),
    "of a column": lambda rank: F.smooth_l1_loss(OUT[KEEP[rank], 1], T[KEEP[rank], 1]),
    "huber": over(F.huber_loss),
    "logits": over(F.binary_cross_entropy_with_logits),
    "probabilities": lambda rank: F.binary_cross_entropy(OUT[KEEP[rank]].sigmoid(), T[KEEP[rank]]),
    "by index": lambda rank: F.binary_cross_entropy_with_logits(OUT[KEEP[rank].nonzero()], T[KEEP[rank].nonzero()]),
    "divergence by batch": over(F.kl_div, reduction="batchmean"),
    "poisson": over(F.poisson_nll_loss),
    "soft margin": over(F.soft_margin_loss),
    "targets that are probabilities": lambda rank: F.cross_entropy(OUT[KEEP[rank]], PROBABILITIES[KEEP[rank]]),
    "the target has the graph": lambda rank: F.mse_loss(T[KEEP[rank]], OUT[KEEP[rank]]),
    "masked_select": lambda rank: torch.masked_select((OUT - T).square(), KEEP[rank][:, None]).mean(),
    "over dimensions": lambda rank: (OUT - T).square()[KEEP[rank]].mean((-2, -1)),
    "of the last": lambda rank: (OUT - T).square().sum(1)[KEEP[rank]].mean(-1),
    "stacked": lambda rank: torch.stack(
        [F.cross_entropy(o[None], t[None]) for o, t, keep in zip(OUT, Y, KEEP[rank], strict=True) if keep]
    ).mean(),
    "one of two terms": lambda rank: F.cross_entropy(OUT, Y) + 0.5 * over(F.l1_loss)(rank),
    "accumulated, too": lambda rank: over(F.mse_loss)(rank) / 4,
    "a mean of a mean": lambda rank: over(F.mse_loss)(rank).mean(),
    "ignored targets, and a mean of a mean": lambda rank: F.cross_entropy(OUT, PADDED[rank]).mean(),
}
OF_ITS_OWN |= OF_A_SELECTION
OF_EQUAL_SIZE: dict[str, Callable[[int], torch.Tensor]] = {
    "as many kept": lambda rank: F.mse_loss(OUT[KEEP[0].roll(rank)], T[KEEP[0].roll(rank)]),
    "in the model": lambda rank: F.mse_loss(OUT - OUT[KEEP[rank]].mean(0), T) / 4,
    "in the model, squared": lambda rank: F.mse_loss(OUT * F.mse_loss(OUT[KEEP[rank]], T[KEEP[rank]]), T) / 4,
    "a penalty of the weights": lambda rank: F.mse_loss(OUT, T.roll(rank)) + MODEL.weight.abs().mean(),
    "divided by the batch, and some kept": lambda rank: (OUT - T).square().sum(1)[KEEP[rank]].sum() / len(T),
    "brought together": lambda rank: over(F.mse_loss, reduction="sum")(rank) * 2 / torch.tensor(27.0),
}
OF_A_SMALLER_BATCH: dict[str, Callable[[int], torch.Tensor]] = {
    "squared": lambda rank: F.mse_loss(OUT[: 6 - rank], T[: 6 - rank]),
    "losses of samples": lambda rank: F.cross_entropy(OUT[: 6 - rank], Y[: 6 - rank], reduction="none").mean(),
    "probabilities": lambda rank: F.cross_entropy(OUT[: 6 - rank], PROBABILITIES[: 6 - rank]),
    "over dimensions": lambda rank: (OUT - T)[: 6 - rank].square().mean((0, 1)),
    "accumulated": lambda rank: (OUT - T)[: 6 - rank].abs().mean(1).mean() / 4,
    "two terms": lambda rank: (
        F.l1_loss(OUT[: 6 - rank], T[: 6 - rank]) + F.cross_entropy(OUT[: 6 - rank], Y[: 6 - rank])
    ),
}
OF_ALL: dict[str, Callable[[int], torch.Tensor]] = {
    "a mean": lambda rank: F.cross_entropy(OUT[: 6 - rank], Y[: 6 - rank]),
    "divided by the batch": lambda rank: F.cross_entropy(OUT[: 6 - rank], Y[: 6 - rank], reduction="sum") / (6 - rank),
    "accumulated": lambda rank: F.cross_entropy(OUT[: 6 - rank], Y[: 6 - rank]) / 4,
    "as many ignored": lambda rank: F.cross_entropy(OUT, PADDED[0].roll(rank)),
    "smoothed": lambda rank: F.cross_entropy(OUT, Y.roll(rank), label_smoothing=0.1),
}


def told(loss: Callable[[int], torch.Tensor], sizes: tuple[int, int]) -> dict[str, str]:
    ended = []
    for rank, size in enumerate(sizes):
        summed = SummedLosses()
        summed.begin(2)
        assert summed.due()
        summed.look(loss(rank), size, {p.shape for p in MODEL.parameters()})
        ended.append(Finished(rank=rank, time=0.0, steps=1, compared=summed.divisors()))
    return work_advice(ended)


@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_a_rank_divides_by_a_number_of_its_own(name: str) -> None:
    assert "loss = total * world_size / reduce(count" in told(OF_ITS_OWN[name], (BATCH, BATCH))["divisors"]


@pytest.mark.parametrize("name", OF_ALL)
def test_ranks_divide_by_the_same_number_or_by_the_size_of_their_batches(name: str) -> None:
    smaller = name in ("a mean", "divided by the batch", "accumulated")
    assert told(OF_ALL[name], (BATCH, BATCH - smaller)) == {}


@pytest.mark.parametrize("name", OF_EQUAL_SIZE)
def test_means_of_as_many_on_all_ranks_and_means_within_a_model(name: str) -> None:
    assert told(OF_EQUAL_SIZE[name], (BATCH, BATCH)) == {}


@pytest.mark.parametrize("name", OF_A_SMALLER_BATCH)
def test_a_mean_over_a_smaller_last_batch(name: str) -> None:
    assert told(OF_A_SMALLER_BATCH[name], (BATCH, BATCH - 1)) == {}
    assert told(OF_A_SMALLER_BATCH[name], (BATCH, BATCH)).keys() == {"divisors"}, "or else nothing was compared"
