"""Replaces functions of other packages, each of them once.

A plain loop works because a few functions of torch do something more on a rank. Each of them has one wrapper, for the
life of the process, which calls its listeners in the order of `TABLE` (`replaced_functions.py`), outermost first, and
the function itself last. A listener is `make(old) -> new`: what is called in place of `old`. Listeners are added and
removed in any order; a wrapper without any does what the function does, so that a cell may keep one that it has
imported by name.

A function is replaced while it has listeners. Besides, a rank removes all wrappers while it waits for its next message,
and during a message has all those in place that a cell may import by name, because a parcel may name them.
A function that somebody else has put in place of a wrapper is left alone: it calls the wrapper, or means not to.

Nothing else in nbtrain assigns to an attribute of another package.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, GetSetDescriptorType
from typing import Any, Generic, TypeVar

from nbtrain.base.when_imported import when_imported
from nbtrain.compat.internals import find
from nbtrain.compat.replaced_functions import TABLE, Row

Make = Callable[[Any], Any]
"""the function → what is called in its place"""
Owner = TypeVar("Owner")


# --- who listens ---------------------------------------------------------------------------------


class Listeners:
    """The listeners of one part of nbtrain. `close` removes them all."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []

    def listen(self, path: str, name: str, make: Make, owner: Any = None) -> None:
        """`path`, `name`: as in `TABLE`. `owner`: a subclass that overrides the row's method."""
        for place in _places_of(path, owner):
            self._ends.append(place.add(name, make))

    def when_imported(self, module: str, paths: Sequence[str], name: str, make: Callable[[str], Make]) -> None:
        """Listen to each of the paths, with what `make` gives for it, as soon as anybody has imported `module`. Imports
        nothing itself."""

        def begin() -> None:
            for path in paths:
                self.listen(path, name, make(path))

        self._ends.append(when_imported(module, begin))

    def hook(self, handle: Any) -> None:
        """Remove a hook of torch's, too, by its handle."""
        self._ends.append(handle.remove)

    def at_end(self, do: Callable[[], None]) -> None:
        """Do this, too, when listeners are removed."""
        self._ends.append(do)

    def close(self) -> None:
        """Remove all listeners, even if one raises: the first error is raised at the end."""
        first: BaseException | None = None
        while self._ends:
            try:
                self._ends.pop()()
            except Exception as error:  # raised when all are removed
                first = first or error
        if first is not None:
            raise first


@contextmanager
def listening(path: str, name: str, make: Make) -> Iterator[None]:
    """Listen for as long as the context lasts."""
    listeners = Listeners()
    listeners.listen(path, name, make)
    try:
        yield
    finally:
        listeners.close()


class While(Generic[Owner]):
    """Listeners that are in place while there is at least one owner."""

    def __init__(self, put: Callable[[Listeners], None]) -> None:
        self.owners: list[Owner] = []
        self._put = put
        self._listeners = Listeners()

    def on(self, owner: Owner) -> None:
        if not self.owners:
            try:
                self._put(self._listeners)
            except BaseException:
                self._listeners.close()
                raise
        self.owners.append(owner)

    def off(self, owner: Owner) -> None:
        if owner in self.owners:
            self.owners.remove(owner)
            if not self.owners:
                self._listeners.close()


# --- the functions themselves --------------------------------------------------------------------


def original(path: str) -> Any:
    """What is there without nbtrain: the package's function, or what somebody else has put in its place."""
    (place, *_) = _places_of(path)
    return place.found if place.stands else find(path)


def path_of(function: Any) -> str:
    """The path that a wrapper stands for; empty for any other function."""
    return str(vars(function)[PATH]) if function.__code__ is _CODE else ""


def imported_as(function: Any) -> str:
    """The same of the function itself, too, where cells import it by name: pickle may know it by another name."""
    if not _names and "torch" in sys.modules:
        _names.update({at(path): path for row in TABLE if row.imported for path in _paths_there(row)})
    return _names.get(function, "") or (path_of(function) if type(function) is FunctionType else "")


def _paths_there(row: Row) -> Iterator[str]:
    """Those whose module is imported, and has it."""
    for path, _ in row.paths():
        module, _, name = path.rpartition(".")
        if hasattr(sys.modules.get(module), name):
            yield path


def at(path: str) -> Any:
    """What a cell gets that imports the function by name: on a rank the wrapper, even if somebody has replaced it;
    in a notebook the package's own."""
    owner, name = find(path.rpartition(".")[0]), path.rpartition(".")[2]
    place = _places.get((id(owner), name))
    if place is None:
        return getattr(owner, name)
    return place.lasting.function if _whole else place.first


@contextmanager
def without(*paths: str) -> Iterator[None]:
    """Inside, these have no listeners."""
    places = [place for path in paths for place in _places_of(path)]
    for place in places:
        place.mute(True)
    try:
        yield
    finally:
        for place in places:
            place.mute(False)


@contextmanager
def in_place() -> Iterator[None]:
    """On a rank, around all that it does for one message: the wrappers are in place only inside."""
    try:
        _all_stand(True)
        yield
    finally:
        _all_stand(False)


def lay_aside() -> None:
    """From now on nothing is replaced outside of `in_place`, whoever listens."""
    _all_stand(False)


PATH = "nbtrain_path"
"""Attribute of a wrapper: its path; `functools.wraps` copies it to others."""
_names: dict[Any, str] = {}
"""a function that cells import by name → its path"""
_ABSENT: Any = object()
_places: dict[tuple[int, str], _Place] = {}
_standing = True
"""functions with listeners are replaced"""
_whole = False
"""and so are those that cells import by name"""


class _Wrapper:
    """The function that takes another's place, and the chain that it calls."""

    def __init__(self, function: Any, path: str, row: Row) -> None:
        self.chain: Any = function
        self.function: Any
        if isinstance(function, property):
            setter = None if function.fset is None else lambda obj, value: self.chain.fset(obj, value)
            self.function = property(lambda obj: self.chain.fget(obj), setter, doc=function.__doc__)
            return

        self.function = _like(function, _calls(self))  # shown by `help` as the function is
        vars(self.function)[PATH] = path
        if row.static:
            self.function = staticmethod(self.function)
        elif row.of_class:
            self.function = classmethod(self.function)


def _calls(wrapper: _Wrapper | None) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        return wrapper.chain(*args, **kwargs)  # type: ignore[union-attr]  # without one it is never called

    return function


_CODE = _calls(None).__code__


class _Place:
    """An attribute of a module or class, and what is there."""

    def __init__(self, owner: Any, name: str, path: str, row: Row, passing: bool, twin: _Place | None) -> None:
        """`twin`: another place that may have the same function."""
        self.owner, self.name, self.path, self.row = owner, name, path, row
        self.passing = passing
        """the owner may be a class of the notebook, which must not be kept alive without listeners"""
        self.order = list(row.listeners)
        self.listeners: list[tuple[int, Make]] = []
        """outermost first"""
        self.muted = 0
        self.stands = False
        self.before: Any = _ABSENT
        """what the owner's own `__dict__` had"""
        original = self._unbound(getattr(owner, name, None))
        self.attribute = original if isinstance(original, GetSetDescriptorType) else None
        """an attribute written in C, which is wrapped as a property"""
        self.found: Any = original if self.attribute is None else _as_property(self.attribute)
        """what it had or inherited"""
        self.theirs: Any = _ABSENT
        """what somebody else put in place of the wrapper"""
        self.first = self.found
        self.shared = False
        """another place has the same lasting wrapper"""
        self.lasting: _Wrapper
        """wrapper of the package's own function, which cells may have imported and go on using"""
        if twin is not None and twin.first is self.first:
            self.lasting, self.shared, twin.shared = twin.lasting, True, True
        else:
            self.lasting = _Wrapper(self.first, path, row)
        self.wrapper = self.lasting

    def add(self, name: str, make: Make) -> Callable[[], None]:
        """Add a listener; returns what removes it."""
        entry = (self.order.index(name), make)
        # Of one name the last to come is the outermost.
        at = next((i for i, other in enumerate(self.listeners) if other[0] >= entry[0]), len(self.listeners))
        self.listeners.insert(at, entry)
        self._settle()

        def end() -> None:
            at = next(i for i, other in enumerate(self.listeners) if other is entry)
            del self.listeners[at]
            self._settle()
            if not self.listeners and self.passing:
                _places.pop((id(self.owner), self.name), None)

        return end

    def mute(self, on: bool) -> None:
        self.muted += 1 if on else -1
        self._compose()

    def put(self) -> None:
        now = vars(self.owner).get(self.name, _ABSENT)
        if now is self.wrapper.function or (now is self.theirs and now is not _ABSENT):
            self.stands = True
            return
        if now is _ABSENT or now is not self.before:  # else it was looked at when it was taken away
            self.before = now
            self._find(getattr(self.owner, self.name, None) if now is _ABSENT else now)
        setattr(self.owner, self.name, self.wrapper.function)
        self.stands, self.theirs = True, _ABSENT

    def take(self) -> None:
        self.stands = False
        now = vars(self.owner).get(self.name, _ABSENT)
        if now is not self.wrapper.function:
            # If it is the package's own, somebody has only put back what he had kept from before.
            self.theirs = _ABSENT if now is self.before or now is self.first else now
        elif self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)

    def wanted(self) -> bool:
        return (_standing or self.row.stays) and bool(self.listeners or (_whole and self.row.imported))

    def _find(self, now: Any) -> None:
        """Note the function to wrap. One that is not the package's own may call the lasting wrapper, which must not
        call it again: so it gets a wrapper of its own, and the lasting one calls the package's function, unless another
        place shares it and would lose its listeners."""
        if self.attribute is not None and now is self.attribute:
            return
        if self.row.of_class:
            now = self._unbound(now)
        if now is not self.found:
            if not self.shared:
                self.lasting.chain = self.first
            own = now is self.first or now is self.lasting.function
            self.wrapper = self.lasting if own else _Wrapper(now, self.path, self.row)
            self.found = self.first if own else now
            self._compose()

    def _unbound(self, function: Any) -> Any:
        return getattr(function, "__func__", function) if self.row.of_class else function

    def _settle(self) -> None:
        """Put the wrapper in place, or take it away, after listeners have changed."""
        self._compose()
        wanted = self.wanted()
        if wanted and not self.stands:
            self.put()
        elif self.stands and not wanted:
            self.take()

    def _compose(self) -> None:
        chain = self.found
        for _, make in reversed(() if self.muted else self.listeners):
            chain = _like(chain, make(chain))
        self.wrapper.chain = chain


def _as_property(attribute: Any) -> property:
    return property(lambda obj: attribute.__get__(obj), lambda obj, value: attribute.__set__(obj, value))


def _like(old: Any, new: Any) -> Any:
    """`new` with the name and signature of `old`, if it is a closure: other listeners may ask for them."""
    made = isinstance(new, FunctionType) and "<locals>" in new.__qualname__
    return functools.wraps(old)(new) if made and callable(old) else new


def _all_stand(on: bool) -> None:
    global _standing, _whole
    _standing = _whole = on
    if on:
        _make_imported()
    for place in _places.values():
        # As `wanted` has it, without a call for each.
        if not place.row.stays and place.stands != (on and bool(place.listeners or place.row.imported)):
            place.take() if place.stands else place.put()


@functools.cache
def _make_imported() -> None:
    for row in TABLE:
        if row.imported:
            for path, _ in row.paths():
                _places_of(path)


@functools.cache
def _rows() -> dict[str, tuple[Row, tuple[str, ...]]]:
    return {path: (row, also) for row in TABLE for path, also in row.paths()}


def _places_of(path: str, owner: Any = None) -> list[_Place]:
    row, also = _rows()[path]
    if owner is not None:
        where = f"{owner.__module__}.{owner.__qualname__}.{path.rpartition('.')[2]}"
        return [_place(owner, where, row, passing=True)]
    places: list[_Place] = []
    for where in (path, *also):
        if row.maybe and not _is_there(where):
            continue
        places.append(_place(find(where.rpartition(".")[0]), where, row, twin=places[0] if places else None))
    return places


def _is_there(path: str) -> bool:
    try:
        find(path)
    except (ImportError, AttributeError):
        return False
    return True


def _place(owner: Any, path: str, row: Row, passing: bool = False, twin: _Place | None = None) -> _Place:
    name = path.rpartition(".")[2]
    key = id(owner), name
    if key not in _places:
        _places[key] = _Place(owner, name, path, row, passing, twin)
    return _places[key]
