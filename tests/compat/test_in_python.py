"""What nbtrain/compat relies on in Python, numpy, cloudpickle and IPython and no name tells."""

from __future__ import annotations

import abc
import asyncio
import atexit
import ctypes
import enum
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbtrain.compat import kernel, namespaces, numpy_random, pandas, pickling, python
from nbtrain.worker.setup.replace_references import replace_references
from tests.support.kernels import Kernel, Result
from tests.support.shells import bare_shell

# --- python --------------------------------------------------------------------------------------


def test_who_was_registered_with_an_abstract_class() -> None:
    class Base(abc.ABC):  # noqa: B024
        pass

    class Other:
        pass

    assert python.registered(Base) == []
    Base.register(Other)
    assert python.registered(Base) == [Other]
    assert python.ABC_REGISTRY in vars(Base)
    assert vars(Base).keys() & {name for name in vars(Base) if name.startswith("_abc")} <= python.OF_CLASSES


def test_who_hears_of_files_that_python_has_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    def hear(module: Any) -> None:
        if module.__name__.startswith("nbtrain_heard"):
            heard.append((module.__name__, module.x))

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nbtrain_heard_a.py").write_text("x = 1")
    (tmp_path / "nbtrain_heard_b.py").write_text("x = 2\n1 / 0")
    assert python.after_execution(hear)
    assert not python.after_execution(hear)
    module = importlib.import_module("nbtrain_heard_a")
    importlib.reload(module)
    assert heard == [("nbtrain_heard_a", 1)] * 2
    with pytest.raises(ZeroDivisionError) as raised:
        import nbtrain_heard_b  # noqa: F401
    files = [os.path.basename(str(frame.path)) for frame in raised.traceback]
    assert files == [os.path.basename(__file__), "nbtrain_heard_b.py"], "no frame of ours is shown"
    assert len(heard) == 2


def test_a_warning_that_is_always_ignored_is_one_of_our_own() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before = len(python.own_filters)
        python.ignore_always("nbtrain: .* of no use", FutureWarning)
        warnings.warn("nbtrain: this is of no use", FutureWarning, stacklevel=1)
        assert not said
        assert python.own_filters.pop() in warnings.filters
        assert len(python.own_filters) == before


def test_a_patch_that_was_started_is_known_until_it_is_stopped() -> None:
    patch = mock.patch.object(warnings, "warn")
    patch.start()
    table = mock.patch.dict(os.environ, {"A": "b"})
    table.start()
    assert python.started_mocks() == [(warnings, "warn")]
    mock.patch.stopall()
    assert python.started_mocks() == []


# --- pandas --------------------------------------------------------------------------------------


def test_options_of_pandas_that_somebody_has_set() -> None:
    pd = pytest.importorskip("pandas")
    before = pandas.options()
    assert before is not None
    with pd.option_context("display.max_rows", 7):
        assert pandas.options() == {**before, "display.max_rows": 7}
    assert pandas.options() == before


# --- python, once more ---------------------------------------------------------------------------


def test_functions_that_keep_their_results_have_a_class() -> None:
    assert isinstance(functools.lru_cache(len), python.LruCache)
    assert not isinstance(len, python.LruCache)


def test_the_frame_of_who_called() -> None:
    def asks() -> Any:
        return python.caller()

    def outer() -> Any:
        return python.caller(2)

    def between() -> Any:
        return outer()

    here = inspect.currentframe()
    assert asks() is here
    assert between() is here


def test_the_environment_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = python.raw_environment()
    before = dict(raw)
    monkeypatch.setenv("NBTRAIN_COMPAT", "é")
    assert python.raw_environment() != before
    assert python.raw_environment() is raw
    assert os.fsencode("é") in raw.values()


def test_a_task_is_made_where_no_loop_turns() -> None:
    loop = asyncio.new_event_loop()

    async def answer() -> int:
        return 42

    try:
        python.set_running_loop(loop)
        task = asyncio.create_task(answer())
        python.set_running_loop(None)
        assert loop.run_until_complete(task) == 42
    finally:
        python.set_running_loop(None)
        loop.close()


def _sockets(directory: str) -> None:
    python.put_sockets_into(directory)
    with multiprocessing.Manager() as manager:
        found = [os.path.dirname(str(manager.address))]
    assert found == [directory], found


def test_sockets_of_multiprocessing_are_where_they_are_to_be(tmp_path: Any) -> None:
    """In a process of its own: nothing takes it back."""
    child = multiprocessing.get_context("fork").Process(target=_sockets, args=(os.path.dirname(str(tmp_path)),))
    child.start()
    child.join()
    assert child.exitcode == 0


class Thing:
    pass


def test_who_asks_who_holds_an_object_does_not_hold_it() -> None:
    """Python 3.13 takes what is passed as `*list` for a holder: `replace_references` would not come to an end."""
    old, new = Thing(), Thing()
    held = {"list": [old], "tuple": ((old, 1),), "key": {old: 1}}
    replace_references([(old, new)])
    assert held == {"list": [new], "tuple": ((new, 1),), "key": {new: 1}}
    things = (Thing(), Thing())
    assert [one for one in gc.get_referrers(*things) if type(one) is tuple] in ([], [things])


def test_what_python_keeps_on_an_enum_and_calls_its_modules() -> None:
    class Colour(enum.Enum):
        RED = 1

    assert set(vars(Colour.RED)) <= python.OF_ENUM_MEMBERS
    assert type(copyright).__module__ == python.SITE_BUILTINS
    assert type(ctypes.Structure).__module__ == python.OF_CTYPES


# --- arrays --------------------------------------------------------------------------------------


def test_numpys_generators() -> None:
    generator, legacy = np.random.default_rng(5), np.random.RandomState(5)
    assert numpy_random.bit_generator(generator) is generator.bit_generator
    assert isinstance(numpy_random.bit_generator(legacy), np.random.MT19937)
    sequence = numpy_random.seed_sequence(generator.bit_generator)
    assert isinstance(sequence, np.random.SeedSequence)
    assert sequence.entropy == 5
    (child,) = generator.spawn(1)
    assert sequence.n_children_spawned == 1
    assert child is not generator
    assert not numpy_random.is_global_state(legacy)
    state = np.random.rand.__self__
    assert numpy_random.is_global_state(state)


# --- pickling ------------------------------------------------------------------------------------


def by_value(source: str, name: str) -> Any:
    """As a cell defines it: no module has it."""
    space: dict[str, Any] = {"__name__": "__main__", "enum": enum}
    exec(textwrap.dedent(source), space)
    return space[name]


def test_what_goes_by_name() -> None:
    assert pickling.goes_by_name(os.path.join)
    assert not pickling.goes_by_name(by_value("def f(): pass", "f"))


def test_globals_of_code_and_of_the_functions_in_it() -> None:
    function = by_value("def f():\n    def g(): return deep\n    return wide, g", "f")
    assert {*pickling.globals_in(function.__code__)} == {"deep", "wide"}


def test_a_class_is_taken_apart_and_made_anew() -> None:
    source = """
    class Base: pass
    class Mine(Base):
        x = 1
        def double(self): return self.x * 2
    """
    cls = by_value(source, "Mine")
    meta, name, bases, keywords, *_ = pickling.class_arguments(cls)
    assert (meta, name, [one.__name__ for one in bases]) == (type, "Mine", ["Base"])
    made = pickling.make_class(meta, name, bases, keywords)
    assert made is not cls
    made.double = cls.double
    made.x = 4
    assert made().double() == 8
    assert made.__name__ == "Mine"


def test_an_enum_is_taken_apart_and_made_anew() -> None:
    source = "class Colour(enum.Enum):\n    RED = 1\n    BLUE = 2\n    def loud(self): return self.name + '!'"
    cls = by_value(source, "Colour")
    bases, name, qualname, members, module, *_ = pickling.enum_arguments(cls)
    assert (bases, name, members) == ((enum.Enum,), "Colour", {"RED": 1, "BLUE": 2})
    made = pickling.make_enum(bases, name, qualname, members, module)
    assert [one.name for one in made] == ["RED", "BLUE"]
    assert made is not cls
    body = pickling.enum_body(cls)
    assert "loud" in body
    assert not {"RED", "BLUE"} & body.keys()
    made.loud = body["loud"]
    assert made.RED.loud() == "RED!"


# --- kernel --------------------------------------------------------------------------------------


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    with bare_shell() as found:
        yield found


def test_an_exception_says_itself_how_it_is_shown(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    error = ZeroDivisionError("hidden")
    assert kernel.renders(error) is None
    kernel.show_as(error, ["one line", "and another"])
    render = kernel.renders(error)
    assert render() == ["one line", "and another"]
    shell.user_ns["error"] = error
    shell.run_cell("raise error")
    assert capsys.readouterr().out == "one line\nand another\n"


def test_a_shell_is_asked_how_an_error_is_shown(shell: InteractiveShell) -> None:
    """By a class of its own, as ranks have one."""

    class Asked(kernel.ShownErrors):
        def __init__(self) -> None:
            super().__init__(config=shell.config)
            self.asked: list[BaseException] = []
            self.lines: list[str] = []

        def shown_traceback(self, error: BaseException, tb: Any) -> Any:
            self.asked.append(error)
            return tb.tb_next

        def take_traceback(self, lines: list[str]) -> None:
            self.lines += lines

    asked = Asked()
    try:
        asked.run_cell("def f():\n    return 1 / 0\nf()")
    finally:
        asked.restore_sys_module_state()
        asked.atexit_operations()
        atexit.unregister(asked.atexit_operations)
    assert asked.asked
    assert {type(one) for one in asked.asked} == {ZeroDivisionError}
    shown = "\n".join(asked.lines)
    assert "1 / 0" in shown
    assert "ZeroDivisionError" in shown


def test_cells_have_file_names_and_numbers(shell: InteractiveShell) -> None:
    shell.run_cell("here = lambda: 1", store_history=True)
    names = kernel.cell_names(shell)
    assert names[shell.user_ns["here"].__code__.co_filename] == 1
    assert kernel.autoreloader(shell) is None
    shell.run_cell("!exit 3")
    assert shell.user_ns[namespaces.EXIT_CODE] == 3


def test_autoreload_is_found(shell: InteractiveShell) -> None:
    shell.run_line_magic("load_ext", "autoreload")
    assert kernel.autoreloader(shell) is not None


def inside(function: Callable[[], Any], notebook: Kernel) -> Result:
    """Run it as a cell of a kernel that knows what this file imports of nbtrain."""
    source = "from nbtrain.compat import kernel\n" + inspect.getsource(function) + f"{function.__name__}()"
    result = notebook.run(source)
    assert result.error is None, result.text
    return result


def _door() -> None:
    ip = get_ipython().kernel  # type: ignore[name-defined]  # noqa: F821
    way = kernel.shell_channel(ip)
    assert way is not None
    socket, replies, back = way
    assert hasattr(socket, "recv_multipart")
    assert callable(replies)
    assert replies() is not None
    assert callable(back)
    assert kernel.shell_channel(object()) is None
    message = ip.get_parent()
    kernel.idle(ip, message)
    kernel.busy(ip, message)
    kernel.busy(ip)


def _replies() -> None:
    ip = get_ipython().kernel  # type: ignore[name-defined]  # noqa: F821
    kernel.reply_through_stream(ip)
    manager = getattr(getattr(ip, "shell_channel_thread", None), "_manager", None)
    assert getattr(manager, "_shell_socket", ip.shell_stream) is ip.shell_stream
    kernel.reply_through_stream(None)


def _panel() -> None:
    import anywidget

    widget = anywidget.AnyWidget()
    assert {kernel.MODEL_VERSION, kernel.VIEW_VERSION} <= set(widget.trait_names())
    kernel.answer_in_own_thread(widget.comm)
    known = getattr(widget.comm, "_reply_subshell_for", None)
    assert known is None or known({}, "own") == "own"


@pytest.mark.kernel
def test_a_kernels_door_and_its_widgets(shared_kernel: Kernel) -> None:
    inside(_door, shared_kernel)
    inside(_replies, shared_kernel)
    inside(_panel, shared_kernel)


def test_where_another_thread_is() -> None:
    over = threading.Event()

    def waits() -> None:
        over.wait(10)

    thread = threading.Thread(target=waits)
    thread.start()
    try:
        with python.frames_of(thread.ident) as frames:
            assert waits.__code__ in [frame.f_code for frame in frames]
    finally:
        over.set()
        thread.join()
    for gone in (thread.ident, None):
        with python.frames_of(gone) as frames:
            assert list(frames) == []


FRAMES_OF_A_THREAD_THAT_ENDS = """
    import gc, threading
    from nbtrain.compat.python import frames_of

    go, inside = threading.Event(), threading.Event()

    def leaf():
        inside.set()
        go.wait()

    def middle(): leaf()
    def outer(): middle()

    class Waits:
        "Its finalizer lets the other thread leave all its calls."
        def __init__(self): self.itself = self
        def __del__(self):
            go.set()
            other.join()

    other = threading.Thread(target=outer)
    other.start()
    inside.wait()
    gc.set_threshold(0)
    Waits()
    with frames_of(other.ident) as frames:
        calls = [next(frames).f_code.co_name]
        gc.set_threshold(1)
        for frame in frames:
            calls.append(frame.f_code.co_name)
        gc.set_threshold(0)
    print([name for name in calls if name in ("leaf", "middle", "outer")], gc.isenabled())
    go.set()
"""


def test_a_finalizer_that_waits_for_the_other_thread() -> None:
    """It is not run while frames are read: Python 3.11 would crash."""
    code = textwrap.dedent(FRAMES_OF_A_THREAD_THAT_ENDS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "['leaf', 'middle', 'outer'] True\n"), done.stderr


def test_whether_a_front_end_lets_its_user_type() -> None:
    from ipykernel.kernelbase import Kernel

    assert kernel.takes_input(Kernel()) is False  # until a request says otherwise
    assert kernel.takes_input(None) is True
