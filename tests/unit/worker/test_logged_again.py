"""A name that is logged several times in a step is said; one that is logged once in each is not."""

from __future__ import annotations

from nbtrain.worker.measure.logged_values import LoggedAgain


def test_once_in_each_step_is_as_it_should_be() -> None:
    seen = LoggedAgain()
    for step in range(1, 4):
        seen.note(step, ["loss", "accuracy"])
    seen.note(3, ["val_loss"])
    assert seen.advice(True) == seen.advice(False) == {}


def test_the_name_that_came_most_often_is_named() -> None:
    seen = LoggedAgain()
    for step in range(3):
        seen.note(step, ["loss"])
        for _ in range(20):
            seen.note(step, ["val_loss"])
        for _ in range(2):
            seen.note(step, ["val_accuracy"])
    assert seen.advice(True)["log again"].startswith("val_loss was logged 20 times in one step; ")
    assert seen.advice(False)["log without a step"].startswith("val_loss was logged 20 times and no optimizer took a ")
