"""The strategy picker in a real kernel, without a page."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, Notebook

VIEW = "application/vnd.jupyter.widget-view+json"

PLAIN = "import nbtrain; form = nbtrain.picker(plain=True, devices=2); display(form)"

MODEL = """
model = net(); opt = adamw(model); loader = DataLoader(data, batch_size=16)
def values(widget):
    for child in getattr(widget, 'children', ()):
        yield from values(child)
    yield widget
def of(form, description):
    (found,) = (w for w in values(form._view.widget) if getattr(w, 'description', '') == description)
    return found
def texts(form):
    return ' '.join(w.value for w in values(form._view.widget) if type(w).__name__ == 'HTML')
"""


@pytest.fixture
def trained(kernel: Kernel) -> Notebook:
    notebook = Notebook(kernel)
    notebook(MODEL)
    return notebook


@pytest.mark.thorough
@pytest.mark.kernel
def test_it_is_there_before_anything_is_known_of_the_model(trained: Notebook) -> None:
    cell = trained.kernel.start("%distributed pick -d 2\nprint('planned')")
    trained.kernel.wait_for(lambda: cell.displays)
    assert not cell.stdout
    trained.kernel.wait(cell)
    assert cell.error is None
    (shown,) = cell.displays
    assert set(shown) == {VIEW, "text/plain"}


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.limit(120)
def test_the_plain_form_chooses_measures_and_uses(trained: Notebook) -> None:
    shown = trained(PLAIN)
    assert VIEW in shown.displays[0]
    assert "★ ddp" in (trained("texts(form)").value or "")
    trained("of(form, 'strategy').value = 'fsdp'; of(form, 'comm-dtype').value = 'bf16'")
    assert trained("form.line").value == "'--strategy fsdp --devices 2 --comm-dtype bf16'"
    trained("of(form, 'ranks').value = 1; of(form, 'ranks').value = 2; of(form, 'goal').value = 'model'")
    assert trained("form.line").value == "'--strategy fsdp --devices 2 --comm-dtype bf16'"
    trained("of(form, 'strategy').value = 'zero1'; before = model[0].weight.clone()")
    trained("of(form, 'measure').value = ['zero1', 'ddp']; of(form, 'Measure').click()", timeout=100)
    assert trained("all(name in texts(form) for name in ('samples/s', 'zero1', '<svg'))").value == "True"
    assert trained("bool((before == model[0].weight).all())").value == "True", "the notebook stays as it was"
    trained("of(form, 'Use in the next cell').click()")
    assert "--strategy zero1" in trained("%distributed").stdout
    trained("%%distributed\n" + LOOP)
    assert trained("bool((before == model[0].weight).all())").value == "False"
    assert trained("'of the last cell [' in form._choice.data()['cell']").value == "True"
