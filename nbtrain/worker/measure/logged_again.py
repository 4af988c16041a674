"""A name that is logged several times in a step, as in a loop that validates: a chart has one value for it."""

from __future__ import annotations

from collections.abc import Iterable


class LoggedAgain:
    """Counts how often each name is logged in a step."""

    def __init__(self) -> None:
        self._step = -1
        self._now: dict[str, int] = {}
        self._name, self._most = "", 1
        """the name that was logged most often in a step"""

    def note(self, step: int, names: Iterable[str]) -> None:
        if step != self._step:
            self._step, self._now = step, dict.fromkeys(names, 1)
            return
        for name in names:
            count = self._now[name] = self._now.get(name, 0) + 1
            if count > self._most:
                self._name, self._most = name, count

    def advice(self, stepped: bool) -> dict[str, str]:
        """`stepped`: an optimizer has taken a step in this cell."""
        if not self._name:
            return {}
        if stepped:
            return {"log again": (
                f"{self._name} was logged {self._most:,} times in one step; the dashboard names the last of these "
                "values. To show their mean, log it once"
            )}  # fmt: skip
        return {"log without a step": (
            f"{self._name} was logged {self._most:,} times and no optimizer took a step; charts are over steps, so the "
            "dashboard names the last of these values. nbtrain.history()[-1].metrics has them one by one"
        )}  # fmt: skip
