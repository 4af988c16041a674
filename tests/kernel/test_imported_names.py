"""Functions that are replaced are replaced under every name by which a notebook, or a module of its own, has imported
them before the cell."""

from __future__ import annotations

import textwrap
from pathlib import Path

from nbtrain.compat.intercept import PATH
from nbtrain.compat.internals import find
from nbtrain.compat.replaced_functions import TABLE
from tests.fuzz.player import Player

OFTEN = (
    "torch.utils.checkpoint.checkpoint",
    "torch.nn.utils.clip_grad_norm_",
    "torch.autograd.grad",
    "torch.randn_like",
)


def there(path: str) -> bool:
    try:
        return callable(find(path))
    except (ImportError, AttributeError):  # not every torch has it
        return False


PATHS = [
    path
    for row in TABLE
    if row.imported
    for first, also in row.paths()
    for path in (first, *also)
    if path.startswith("torch.") and there(path)
]
NAMES = "\n".join(
    f"from {path.rpartition('.')[0]} import {path.rpartition('.')[2]} as f{i}" for i, path in enumerate(PATHS)
)


def test_what_was_imported_by_name_before_the_cell_is_replaced_there(tmp_path: Path) -> None:
    assert set(OFTEN) <= set(PATHS)
    (tmp_path / "names_of_its_own.py").write_text(f"import torch\n{NAMES}\n")
    names = ", ".join(f"f{i}" for i in range(len(PATHS)))
    notebook = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport torch, names_of_its_own\n{NAMES}\nheld = [{names}]"
    )
    cell = f"""
        ways = ([{names}], held, [getattr(names_of_its_own, f"f{{i}}") for i in range({len(PATHS)})])
        result = [[hasattr(f, {PATH!r}) for f in way] for way in ways]
    """
    with Player("ddp") as player:
        for _ in range(2):
            story = player.play([(False, notebook), (True, textwrap.dedent(cell)), (True, textwrap.dedent(cell))])
            assert [played.error for played in story] == [None] * 3
            for played in story[1:]:
                found = [
                    f"{PATHS[i]} {way}"
                    for way in range(3)
                    for i in range(len(PATHS))
                    if not played.held[f"result[{way}][{i}]"]
                ]
                assert found == []
