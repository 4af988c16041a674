"""Finds the largest number that fits: doubling or halving from a guess, then bisection."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], guess: int = 1, most: int = 2**20, within: float = 0.1) -> int:
    """The largest number that fits, to within one or a tenth (`within`); 0: not even 1 fits."""
    low, high = 0, most + 1
    while low < guess < high:
        if fits(guess):
            low, guess = guess, guess * 2
        else:
            high, guess = guess, guess // 2
    while high - low > max(1, int(low * within)):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
