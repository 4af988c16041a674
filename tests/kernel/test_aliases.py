"""Who is identical with whom in the notebook stays so, whatever kind of object it is."""

from __future__ import annotations

import pytest

from tests.support.notebook import Notebook
from tests.support.story import notebook, play, warm_ranks  # noqa: F401

CASES = {
    "a DataFrame that hangs in several places": """
        import pandas as pd
        class Data: pass
        df = pd.DataFrame({"a": [1, 2, 3]}, index=list("xyz")); ds = Data(); ds.df = df; cfg = {"df": df}; alias = df
        --- ranks
        df.loc["x", "a"] = 10; df["b"] = df.a * 2; df.index.name = "i"
        df.drop(index="z", inplace=True)
        --- here
        assert df is ds.df is cfg["df"] is alias
        assert list(alias.b) == [20, 4] and alias.index.name == "i" and list(ds.df.index) == ["x", "y"]
        assert alias.a.sum() == 12 and alias.groupby("b").a.sum().loc[20] == 10
        alias.loc["y", "a"] = 0
        --- ranks
        assert ds.df is cfg["df"] and ds.df.a.sum() == 10
        ds.df["c"] = 1
        --- here
        assert list(alias.columns) == ["a", "b", "c"] and df is ds.df is cfg["df"] is alias""",
    "an object with its own __reduce__": """
        class Own:
            def __init__(self, n): self.n = n
            def __reduce__(self): return Own, (self.n,)
        class Slots:
            __slots__ = ("n",)
            def __init__(self, n): self.n = n
            def __reduce__(self): return Slots, (self.n,)
        o, p = Own(1), Slots(1); held = [o, {"p": p}]; q = p
        --- ranks
        o.n = 2; p.n = 3
        --- here
        assert o is held[0] and o.n == 2 and q is p is held[1]["p"] and q.n == 3""",
    "a subclass of ndarray": """
        import numpy as np
        class Unit(np.ndarray):
            def __array_finalize__(self, obj): self.unit = getattr(obj, "unit", None)
        u = np.arange(3.0).view(Unit); u.unit = "m"; v = u; held = {"u": u}
        --- ranks
        assert type(u) is Unit and u.unit == "m", u.unit
        u[0] = 7; u.note = [1]
        --- here
        assert u is v is held["u"] and type(v) is Unit and v.unit == "m" and v.note == [1] and v[0] == 7
        u.unit = "s"
        --- ranks
        assert u.unit == "s" and u[0] == 7
        u = u * 2
        --- here
        assert u.unit == "s" and u[0] == 14 and v[0] == 7""",
    "what a module keeps as the one of its kind": """
        import argparse, dataclasses, inspect, contextlib
        parser = argparse.ArgumentParser(); parser.add_argument("--a", default=argparse.SUPPRESS)
        from functools import _initial_missing
        kept = {"s": argparse.SUPPRESS, "m": dataclasses.MISSING, "e": inspect.Parameter.empty, "o": _initial_missing}
        --- ranks
        import argparse, dataclasses, functools, inspect
        assert kept["s"] is argparse.SUPPRESS and kept["m"] is dataclasses.MISSING
        assert kept["e"] is inspect.Parameter.empty and kept["o"] is functools._initial_missing
        assert vars(parser.parse_args([])) == {}
        home = [argparse.SUPPRESS, functools._initial_missing]
        --- here
        assert home[0] is argparse.SUPPRESS and home[1] is _initial_missing""",
}


@pytest.mark.sample(first=3)
@pytest.mark.parametrize("name", CASES)
def test_aliases(notebook: Notebook, name: str) -> None:  # noqa: F811
    play(notebook, CASES[name])
