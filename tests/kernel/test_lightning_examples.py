"""Lightning's own examples, as they are published, through both doors: the weights are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.absent import absent
from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.thorough

START = """
%load_ext nbtrain
import os, nbtrain, torch, lightning as L
from torch.utils.data import DataLoader
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, DemoModel
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
os.chdir(ROOT); os.makedirs("data", exist_ok=True)
torch.manual_seed(3)
words = [f"word{number}" for number in torch.randint(0, 40, (1500,)).tolist()]
with open("data/wikitext-2.txt", "w") as file:  # it is there, so nothing is downloaded
    file.write("\\n".join(" ".join(words[at:at + 15]) for at in range(0, 1500, 15)))

MADE = {
    "boring": BoringModel, "manual": ManualOptimBoringModel,
    "transformer": lambda: LightningTransformer(vocab_size=41), "lstm": lambda: LightningLSTM(vocab_size=41),
}
def make(name):
    torch.manual_seed(5)
    model = MADE[name]()
    for one in model.modules():  # what is drawn by two ranks is not what one process draws
        if isinstance(one, torch.nn.Dropout): one.p = 0.0
        if isinstance(one, (torch.nn.LSTM, torch.nn.MultiheadAttention)): one.dropout = 0.0
    return model

def doors(door, strategy, ranks=2):
    given = dict(accelerator="cpu", devices=ranks, max_epochs=1, limit_train_batches=4, limit_val_batches=2,
                 enable_checkpointing=False, default_root_dir=ROOT)
    if door == "nbtrain":
        return nbtrain.Trainer(strategy=strategy, **given)
    return L.Trainer(strategy=f"nbtrain_{strategy}", logger=False, **given)

def one_process(name):
    "Lightning itself, on batches of two ranks' samples."
    model = make(name)
    dataset = model.train_dataloader().dataset
    loader = DataLoader(dataset, 2 * model.train_dataloader().batch_size)
    L.Trainer(accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=4, limit_val_batches=2, logger=False,
              enable_checkpointing=False, enable_progress_bar=False).fit(model, loader)
    return model
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    if find_spec("lightning") is None:
        absent("Lightning is not installed", "pip install nbtrain[lightning]")
    root: Path = tmp_path_factory.mktemp("examples")
    with running_kernel(NBTRAIN_HISTORY=str(root / "history")) as kernel:
        kernel.run(f"ROOT = {str(root)!r}")
        assert kernel.run(START, 120).error is None
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    yield made
    made("%distributed stop")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("door", ["nbtrain", "lightning"])
@pytest.mark.parametrize("name", ["boring", "manual", "transformer"])
def test_an_example_trains_as_lightning_does_in_one_process(
    notebook: Notebook, name: str, door: str, strategy: str
) -> None:
    notebook(f"net = make({name!r}); doors({door!r}, {strategy!r}).fit(net); other = one_process({name!r})", 120)
    assert notebook(
        "all(torch.allclose(p, q, atol=5e-5) for p, q in zip(net.parameters(), other.parameters()))"
    ).value == ("True")
    started = f"all(torch.equal(p, q) for p, q in zip(net.parameters(), make({name!r}).parameters()))"
    assert notebook(started).value == "False", "it has trained"


def test_a_state_of_each_rank_is_said_or_kept(notebook: Notebook) -> None:
    """The hidden state of an LSTM is of a rank's own samples: the same loop in a cell is what this is."""
    notebook("net = make('lstm'); t = doors('nbtrain', 'ddp'); t.fit(net)", 120)
    assert notebook("net.hidden, t.global_step, torch.isfinite(t.callback_metrics['train_loss']).item()").value == (
        "(None, 1, True)"
    )
