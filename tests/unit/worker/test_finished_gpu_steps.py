"""Which steps count once collectives were given up, on a card whose events are reached when the test says so."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.ranks.finished_gpu_steps import CardSteps


@dataclass
class Card:
    """Has done the first `done` things that it was asked for."""

    asked: int = 0
    done: int = 0
    lost: bool = False

    def event(self) -> Any:
        card = self

        class Event:
            def record(self) -> None:
                card.asked += 1
                self.at = card.asked

            def query(self) -> bool:
                if card.lost:
                    raise RuntimeError("CUDA error: device-side assert triggered")
                return self.at <= card.done

        return Event()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.fixture
def steps(card: Card) -> CardSteps:
    found = CardSteps(Steps(0))
    found.start(waits=False)
    return found


def later(do: Any) -> None:
    threading.Timer(0.05, do).start()


def test_a_cell_is_over_when_the_card_is_done(steps: CardSteps, card: Card) -> None:
    later(lambda: setattr(card, "done", 1))
    assert steps.settle()
    assert not steps.cut


@pytest.mark.parametrize(("done", "cut"), [(0, True), (1, True), (2, False)])
def test_the_last_step_counts_if_it_was_done_before_collectives_were_given_up(
    steps: CardSteps, card: Card, done: int, cut: bool
) -> None:
    called: list[int] = []
    stepped = steps.after_each(lambda: called.append(1))
    stepped()
    stepped()
    card.done = done

    def give_up() -> None:
        steps.give_up()
        card.done = 99  # the card goes on, with what nobody has sent

    later(give_up)
    assert not steps.settle()
    assert (steps.cut, called) == (cut, [1, 1])
    steps.start(waits=False)
    assert (steps.cut, steps.given_up) == (False, False)


def test_a_step_that_was_freed_in_its_middle_does_not_count(steps: CardSteps, card: Card) -> None:
    """A scaler waits for the card inside of `step`; what frees it is that collectives are given up."""
    stepped = steps.after_each(lambda: None)
    stepped()
    card.done = 1
    steps.give_up()
    assert not steps.cut
    stepped()
    assert steps.cut


@pytest.mark.parametrize("cut", [True, False])
def test_a_failed_rank_does_not_wait_for_ever(steps: CardSteps, card: Card, cut: bool) -> None:
    steps.after_each(lambda: None)()
    card.done = 0 if cut else 1
    began = time.monotonic()
    assert not steps.settle(0.05)
    assert time.monotonic() - began >= 0.05
    assert steps.cut is cut


def test_a_card_that_is_lost_says_so_itself(steps: CardSteps, card: Card) -> None:
    steps.after_each(lambda: None)()
    card.lost = True
    steps.give_up()
    with pytest.raises(RuntimeError, match="CUDA error"):
        CardSteps(Steps(0)).settle()


def test_where_machines_come_and_go_no_step_is_begun_that_may_be_cut_short(steps: CardSteps, card: Card) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], 0.5)
    steps.start(waits=True)
    card.done = 1
    optimizer.step()
    later(steps.give_up)
    with pytest.raises(RuntimeError, match="aborted"):
        optimizer.step()
    assert weight.item() == 0.5
    steps.end(True)
    optimizer.step()
    assert weight.item() == 0.0
