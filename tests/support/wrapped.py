"""Functions of a library with others around them, for the length of a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest import mock


@contextmanager
def wrapped(around: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """`around`: path of a function → `old -> new`."""
    with ExitStack() as all_of_them:
        for path, wrap in around.items():
            all_of_them.enter_context(mock.patch(path, wrap(resolve_name(path))))
        yield
