"""The picture of a comparison in a real JupyterLab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbformat
import pytest

from tests.support.lab import Notebook, Server

CROWD = """import sys
from nbtrain.annexes.planning.compare.comparison import Comparison
from nbtrain.annexes.planning.compare.measured_way import MeasuredWay
from nbtrain.annexes.planning.compare.comparison import picture
from IPython.display import HTML
names = ["ddp", "fsdp", "zero1", "sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3",
         "deepspeed_stage_3_offload", "pipeline", "dp", "single", "fsdp_cpu_offload"]
rows = [MeasuredWay(name=name, line=f"-s {name}", state="done", ranks=2, memory=(400_000_000 + 900_000 * n,),
                 samples_per_second=pace, paces=(pace - 1, pace, pace + 1))
        for n, name in enumerate(names) for pace in [440 if name == "fsdp" else 400 + n % 3]]
rows.append(MeasuredWay(name="ddp2", line="-s ddp2", state="failed", why="it wants two nodes, here is one"))
found = Comparison(rows=tuple(rows), steps=10, seconds=14.2, over=True)
"""

PLACES = """() => { const svg = document.querySelector('.jp-OutputArea-output svg');
    return [svg.clientWidth, [...svg.querySelectorAll('text')].map(text => {
        const box = text.getBBox(), at = text.getCTM(), own = svg.getCTM();
        const x = box.x + at.e - own.e, y = box.y + at.f - own.f;
        return [text.textContent, x, y, x + box.width, y + box.height]; })]; }"""

IMAGE = "document.querySelector('.jp-OutputArea-output img[alt=\"memory and speed\"]')?.naturalWidth"


@pytest.mark.thorough
@pytest.mark.lab
def test_nothing_covers_anything_and_an_untrusted_notebook_shows_it(
    notebook: Callable[..., Notebook], lab: Server, browser: Any
) -> None:
    page = notebook(CROWD + "HTML(picture(found))", "found")
    page.run(0)
    page.page.wait_for_selector(".jp-OutputArea-output svg")
    wide, texts = page.page.evaluate(PLACES)
    assert wide <= 760
    assert {"ddp", "pipeline", "fsdp_cpu_offload"} <= {name for name, *_ in texts}
    assert sum(name.endswith("★") for name, *_ in texts) == 1
    for number, (name, left, top, right, bottom) in enumerate(texts):
        assert left >= 0, name
        assert right <= wide, name
        for other, *box in texts[number + 1 :]:
            apart = right <= box[0] or box[2] <= left or bottom - 2 <= box[1] or box[3] - 2 <= top
            assert apart, (name, other)

    page.run(1)
    page.page.wait_for_function(f"{IMAGE} > 0")
    page.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    (path,) = lab.root.glob("test_nothing_covers*.ipynb")
    book = nbformat.read(path, as_version=4)
    book.cells[1].outputs[0]["data"]["text/plain"] += " "  # by somebody else: it is not trusted any more
    book.cells = book.cells[1:]
    nbformat.write(book, lab.root / "compared.ipynb")
    again = Notebook(browser, lab, "compared.ipynb")
    try:
        again.page.wait_for_function(f"{IMAGE} > 0")
        assert "deepspeed_stage_1" in again.page.locator(".jp-OutputArea-output table").inner_text()
    finally:
        again.close()
    assert page.external == again.external == []
