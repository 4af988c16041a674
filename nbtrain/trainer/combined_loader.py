"""Several training loaders at once: a batch is one of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbtrain.errors import UsageError
from nbtrain.training.checkpoints.api import current

MODES = ("max_size_cycle", "min_size")


class CombinedLoader:
    """`{"a": loader_a, "b": loader_b}` gives batches `{"a": …, "b": …}`; a list gives lists.

    `max_size_cycle`: an epoch is as long as the longest loader, and shorter ones begin anew; `min_size`: as long as
    the shortest.
    """

    def __init__(self, loaders: dict[Any, Any] | list[Any] | tuple[Any, ...], mode: str = "max_size_cycle") -> None:
        if mode not in MODES:
            raise UsageError(f"CombinedLoader(mode={mode!r}): {' or '.join(map(repr, MODES))}")
        self.loaders, self.mode = loaders, mode

    def __len__(self) -> int:
        lengths = [len(loader) for _, loader in self._named()]
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def __iter__(self) -> Iterator[Any]:
        loaders = sorted(self._named(), key=lambda named: _length(named[1]))  # the progress is of who is asked last
        iterators = {name: iter(loader) for name, loader in loaders}
        seen_whole: set[Any] = set()
        by_name = isinstance(self.loaders, dict)
        while True:
            batch = {}
            for name, loader in loaders:
                try:
                    batch[name] = next(iterators[name])
                except StopIteration:
                    seen_whole.add(name)
                    if self.mode == "min_size" or len(seen_whole) == len(loaders):
                        return
                    iterators[name] = _anew(loader)
                    batch[name] = next(iterators[name])
            yield {name: batch[name] for name, _ in self._named()} if by_name else [batch[at] for at in sorted(batch)]

    def each(self) -> list[Any]:
        return [loader for _, loader in self._named()]

    def _named(self) -> list[tuple[Any, Any]]:
        return list(self.loaders.items() if isinstance(self.loaders, dict) else enumerate(self.loaders))


def _anew(loader: Any) -> Any:
    """Its next pass. Those that were over when a training was stopped, which goes on now, are passed by."""
    while True:
        iterator, loops = iter(loader), current().positions.loops
        opened = loops[-1].opened[-1:] if loops else []
        if not any(one.over and one.iterator() is iterator for one in opened):
            return iterator


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # a stream
        return 0
