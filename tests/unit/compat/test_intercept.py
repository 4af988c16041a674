"""Functions of other packages are replaced once, listeners come and go in any order, and nothing stays behind."""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension  # now: it brings setuptools, which adds to sys.path
from torch.utils.data import DataLoader

from nbtrain.compat import intercept, strategy_packages
from nbtrain.compat.intercept import Listeners, While, listening, original, without
from nbtrain.compat.internals import find
from nbtrain.compat.replaced_functions import TABLE

ROOT = Path(__file__).resolve().parents[3]
BACKWARD = "torch.autograd.backward"
ORDER = ("pipeline", "pieces", "step", "precision")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.autograd.backward, vars(torch.Tensor).get("add_"), vars(DataLoader)["_index_sampler"]
    yield
    assert (torch.autograd.backward, vars(torch.Tensor).get("add_"), vars(DataLoader)["_index_sampler"]) == before
    assert not intercept._whole


def noting(name: str, calls: list[str]) -> Callable[[Any], Any]:
    def make(old: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return old(*args, **kwargs)

        return call

    return make


def backward() -> None:
    x = torch.ones((), requires_grad=True)
    torch.autograd.backward(x * 2)
    assert x.grad == 2


def test_listeners_are_called_in_the_order_of_the_table_whoever_came_first() -> None:
    for come in itertools.permutations(ORDER):
        calls: list[str] = []
        ends = []
        for name in come:
            listeners = Listeners()
            listeners.listen(BACKWARD, name, noting(name, calls))
            ends.append(listeners)
        backward()
        assert tuple(calls) == ORDER
        for listeners in ends:
            listeners.close()


@pytest.mark.parametrize("leave", list(itertools.permutations(range(3))))
def test_listeners_leave_in_any_order_and_nothing_stays_behind(leave: tuple[int, ...]) -> None:
    theirs = torch.autograd.backward
    calls: list[str] = []
    all_of_them = [Listeners() for _ in leave]
    for name, listeners in zip(ORDER, all_of_them, strict=False):
        listeners.listen(BACKWARD, name, noting(name, calls))
    here = {ORDER[i] for i in leave}
    for number in leave:
        all_of_them[number].close()
        here.discard(ORDER[number])
        calls.clear()
        backward()
        assert set(calls) == here
    assert torch.autograd.backward is theirs


def test_one_wrapper_for_the_life_of_the_process() -> None:
    """A cell that has imported the function by name goes on with the listeners of later cells."""
    calls: list[str] = []
    with listening(BACKWARD, "step", noting("first", calls)):
        imported = torch.autograd.backward
    x = torch.ones((), requires_grad=True)
    imported(x * 1)
    assert calls == []
    with listening(BACKWARD, "step", noting("second", calls)):
        assert torch.autograd.backward is imported
        imported(x * 1)
    assert calls == ["second"]


def test_it_is_pickled_by_name_and_shown_as_the_function_is() -> None:
    plain = torch.autograd.backward
    with listening(BACKWARD, "step", noting("", [])):
        ours = torch.autograd.backward
        assert ours is not plain
        assert pickle.loads(pickle.dumps(ours)) is ours
        for name in ("__doc__", "__module__", "__qualname__"):
            assert getattr(ours, name) == getattr(plain, name)


def test_who_wraps_ours_is_left_alone_and_calls_us_once() -> None:
    """Also in a later cell: we are inside of his."""
    plain = torch.autograd.backward
    calls: list[str] = []
    listeners = Listeners()
    listeners.listen(BACKWARD, "step", noting("ours", calls))
    before = torch.autograd.backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return before(*args, **kwargs)

    torch.autograd.backward = theirs  # type: ignore[assignment]
    try:
        backward()
        listeners.close()
        assert torch.autograd.backward is theirs
        backward()
        assert calls == ["theirs", "ours", "theirs"]
        calls.clear()
        with listening(BACKWARD, "step", noting("ours", calls)):
            assert torch.autograd.backward is theirs
            backward()
        assert calls == ["theirs", "ours"]
    finally:
        torch.autograd.backward = plain


def test_what_others_have_put_there_meanwhile_is_what_we_call() -> None:
    plain = torch.autograd.backward
    calls: list[str] = []
    with listening(BACKWARD, "step", noting("ours", calls)):
        pass

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return plain(*args, **kwargs)

    torch.autograd.backward = theirs  # type: ignore[assignment]
    try:
        with listening(BACKWARD, "step", noting("ours", calls)):
            backward()
        assert calls == ["ours", "theirs"]
        assert torch.autograd.backward is theirs
    finally:
        torch.autograd.backward = plain


def test_a_method_that_was_only_inherited_is_inherited_again() -> None:
    assert "retain_grad" not in vars(torch.Tensor)
    calls: list[str] = []
    with listening("torch.Tensor.retain_grad", "scaling", noting("retain_grad", calls)):
        torch.zeros(1, requires_grad=True).retain_grad()
    assert calls == ["retain_grad"]
    assert "retain_grad" not in vars(torch.Tensor)


def test_a_property_stays_a_property() -> None:
    loader = DataLoader(list(range(4)), batch_size=2)  # type: ignore[arg-type]

    def make(old: property) -> property:
        return property(lambda one: [list(old.fget(one))[-1]])  # type: ignore[misc]

    with listening("torch.utils.data.DataLoader._index_sampler", "loaders", make):
        assert [batch.tolist() for batch in loader] == [[2, 3]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_what_is_put_into_a_property_is_told() -> None:
    from torch.distributed.tensor import DTensor

    before, had = DTensor.data, "data" in vars(DTensor)
    put: list[Any] = []

    def make(old: property) -> property:
        return property(old.fget, lambda tensor, value: put.append(value))

    with listening("torch.distributed.tensor.DTensor.data", "values", make):
        now: Any = vars(DTensor)["data"]
        plain = torch.ones(2)
        assert now.fget(plain).tolist() == [1.0, 1.0]
        now.fset(plain, torch.zeros(2))
        assert plain.tolist() == [1.0, 1.0]
    assert [one.tolist() for one in put] == [[0.0, 0.0]]
    assert DTensor.data is before
    assert ("data" in vars(DTensor)) is had


def test_without_listeners_for_a_moment() -> None:
    calls: list[str] = []
    with listening(BACKWARD, "step", noting("ours", calls)):
        with without(BACKWARD):
            backward()
        assert calls == []
        backward()
    assert calls == ["ours"]


def test_the_original_can_be_had() -> None:
    plain = torch.autograd.backward
    assert original(BACKWARD) is plain
    with listening(BACKWARD, "step", noting("", [])):
        assert original(BACKWARD) is plain


def test_while_somebody_wants_it() -> None:
    calls: list[str] = []
    held: While[str] = While(lambda listeners: listeners.listen(BACKWARD, "pieces", noting("pieces", calls)))
    held.on("a")
    held.on("b")
    held.off("a")
    backward()
    held.off("c")  # never was
    held.off("b")
    backward()
    assert calls == ["pieces"]


def test_a_class_of_the_users_is_held_only_while_somebody_listens() -> None:
    class Schedule(torch.optim.lr_scheduler.LRScheduler):
        def step(self) -> None:  # type: ignore[override]
            calls.append("theirs")

    calls: list[str] = []
    step = Schedule.step
    before = len(intercept._places)
    listeners = Listeners()
    path = "torch.optim.lr_scheduler.LRScheduler.step"
    listeners.listen(path, "accumulation", noting("ours", calls), Schedule)
    Schedule.step(None)  # type: ignore[arg-type]
    listeners.close()
    assert calls == ["ours", "theirs"]
    assert Schedule.step is step
    assert len(intercept._places) == before


def test_a_rank_lays_aside_what_is_listened_to_and_has_what_cells_import() -> None:
    plain, save = torch.autograd.backward, torch.save
    calls: list[str] = []
    listeners = Listeners()
    listeners.listen(BACKWARD, "step", noting("ours", calls))
    try:
        intercept.lay_aside()
        assert torch.autograd.backward is plain
        with intercept.in_place():
            assert torch.save is not save
            backward()
        assert calls == ["ours"]
        assert (torch.autograd.backward, torch.save) == (plain, save)
        listeners.close()
        with intercept.in_place():
            backward()
        assert calls == ["ours"]
    finally:
        listeners.close()
        intercept._standing = True


def test_every_row_has_a_place_in_the_installed_torch() -> None:
    for row in TABLE:
        for path, also in row.paths():
            if path.startswith("torch.") and not (row.maybe or row.added):
                for one in (path, *also):
                    assert callable(find(one)) or inspect.isdatadescriptor(find(one)), one


def test_whatever_is_listened_to_the_checks_find_what_they_need() -> None:
    listeners = Listeners()
    try:
        for row in TABLE:
            if row.path.startswith("torch.") and not row.added:
                for path, _ in row.paths():
                    listeners.listen(path, next(iter(row.listeners)), lambda old: old)
        for file in (*strategy_packages.EVERYWHERE, "fsdp2", "dtensor"):
            assert strategy_packages.lacks(file) == (), file
    finally:
        listeners.close()


def test_an_end_that_fails_leaves_no_other_behind() -> None:
    class Handle:
        def remove(self) -> None:
            raise ValueError("not this one")

    plain = torch.autograd.backward
    listeners = Listeners()
    listeners.listen(BACKWARD, "step", noting("", []))
    listeners.hook(Handle())
    with pytest.raises(ValueError, match="not this one"):
        listeners.close()
    assert torch.autograd.backward is plain


def test_a_beginning_that_fails_leaves_nothing_behind() -> None:
    def put(listeners: Listeners) -> None:
        listeners.listen(BACKWARD, "pieces", noting("", []))
        raise ValueError("halfway")

    plain = torch.autograd.backward
    held: While[str] = While(put)
    with pytest.raises(ValueError, match="halfway"):
        held.on("a")
    assert torch.autograd.backward is plain
    assert not held.owners


def test_it_is_known_by_its_path_and_what_only_looks_like_it_is_not() -> None:
    with listening(BACKWARD, "step", noting("", [])):
        ours = torch.autograd.backward

    @functools.wraps(ours)
    def theirs() -> None: ...

    assert intercept.path_of(ours) == BACKWARD
    assert intercept.path_of(theirs) == intercept.path_of(torch.autograd.backward) == ""


@pytest.mark.parametrize("replaced", [0, 1])
def test_who_replaces_one_of_two_names_between_cells_does_not_silence_the_other(replaced: int) -> None:
    import torch.nn.utils.clip_grad as clip_grad

    owners: list[Any] = [torch.nn.utils, clip_grad]
    plain, calls, p = clip_grad.clip_grad_norm_, [], torch.nn.Parameter(torch.ones(2))
    listeners = Listeners()
    listeners.listen("torch.nn.utils.clip_grad_norm_", "step", noting("clip", calls))
    try:
        intercept.lay_aside()
        owners[replaced].clip_grad_norm_ = lambda *args: plain(*args)
        with intercept.in_place():
            for owner in owners:
                owner.clip_grad_norm_([p], 1.0)
        assert calls == ["clip", "clip"]
    finally:
        intercept._standing = True
        listeners.close()
        owners[replaced].clip_grad_norm_ = plain


def test_the_table_in_the_documentation_is_the_one_in_the_code() -> None:
    told = subprocess.run([sys.executable, ROOT / ".ci" / "replaced", "--check"], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
