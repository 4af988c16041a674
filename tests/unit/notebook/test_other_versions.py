"""Packages that other machines have otherwise: which are compared, and that each is said once."""

from __future__ import annotations

from importlib import metadata

import pytest
import sklearn
from tqdm import tqdm

from nbtrain.base.installed_files import installed_versions
from nbtrain.engines.remote.machines import Machine, this_machine
from nbtrain.engines.remote.same_machine import APART
from nbtrain.notebook.pool.other_versions import OtherVersions


def machine(name: str, **packages: str) -> Machine:
    there = {**installed_versions(), **{key.replace("_", "-"): value for key, value in packages.items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(APART, "1")
        found = this_machine("10.0.0.1", "10.0.0.2", 0)
    return Machine(**{**{one: getattr(found, one) for one in Machine.__slots__}, "name": name, "packages": there})


@pytest.mark.parametrize(("code", "has"), [
    ("tqdm([])", {"tqdm": "4.1"}),
    ("import psutil, sys", {"psutil": "5.0"}),
    ("def f():\n    from sklearn.svm import SVC", {"scikit-learn": "1.0"}),
    ("import torch, not_there", {}),
    ("import (", {}),
])  # fmt: skip
def test_what_the_notebook_holds_and_what_a_cell_imports(code: str, has: dict[str, str]) -> None:
    namespace = [tqdm] if "tqdm" in has else [1]
    other = machine("b", tqdm="4.1", psutil="5.0", scikit_learn="1.0", torch="1.0")
    said = OtherVersions().lines(namespace, code, [machine("a"), other])
    here = ", ".join(f"{name} {metadata.version(name)}" for name in has)
    there = ", ".join(f"{name} {version}" for name, version in has.items())
    assert said == ([f"b has {there}, and the notebook {here}: install the same there, or the cell may behave "
                     "differently on its ranks"] if has else [])  # fmt: skip


def test_each_is_said_once_and_what_is_missing_is_named() -> None:
    compared, other = OtherVersions(), machine("b", tqdm="4.1")
    del other.packages["scikit-learn"]  # type: ignore[attr-defined]
    names = [tqdm, sklearn]
    (said,) = compared.lines(names, "pass", [other])
    assert said.startswith("b has no scikit-learn, tqdm 4.1, and the notebook scikit-learn 1")
    assert compared.lines(names, "pass", [other]) == []
    assert [one[:5] for one in compared.lines(names, "pass", [other, machine("c", tqdm="4.2")])] == ["c has"]
