"""Things that people ask other packages for, again and again: docs/asks.md has the error that they see, and these
cells, and names the tests of the others. The number is that of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel, running_kernel
from tests.support.libraries import kernel_with
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks, pytest.mark.thorough]

START = """
%load_ext nbtrain
import os, torch, nbtrain
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
torch.manual_seed(0)
X = torch.randn(64, 4); Y = (X[:, 0] > 0).long()
data = DataLoader(TensorDataset(X, Y), 8)
def net(): torch.manual_seed(1); return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
def alone(epochs, size):
    model = net(); opt = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(epochs):
        for at in range(0, 64, size):
            opt.zero_grad(); F.cross_entropy(model(X[at:at + size]), Y[at:at + size]).backward(); opt.step()
    return model
def alike(a, b): return all(torch.allclose(p, q, atol=1e-5) for p, q in zip(a.parameters(), b.parameters()))
model = net(); opt = torch.optim.AdamW(model.parameters(), 0.01)
SMALL = dict(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
"""
LOOP = """
for x, y in data:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
"""
CELL = "%%distributed --strategy ddp --devices 2 --monitor off\n"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("asks")
    # As bitsandbytes does with CUDA: what an import has set up is of no use in a process that is forked from here.
    (folder / "touches_the_gpu.py").write_text(
        "import os\nowner = os.getpid()\n"
        "def kernel():\n    if os.getpid() != owner:\n"
        "        raise RuntimeError('Cannot re-initialize CUDA in forked subprocess')\n"
        "    return 'computed'\n"
    )
    with running_kernel(NBTRAIN_HISTORY=str(folder / "history")) as kernel:
        kernel.run(f"FOLDER = {str(folder)!r}\nimport os; os.chdir(FOLDER)")
        assert kernel.run(START, 120).error is None
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    made("model = net(); opt = torch.optim.AdamW(model.parameters(), 0.01)")
    yield made
    made("%distributed stop")


def test_1_ranks_are_no_forks_of_the_notebook(notebook: Notebook) -> None:
    """So it may have used CUDA."""
    said = notebook(f"{CELL}parents = gather(os.getppid()); ranks = gather(os.getpid())").text
    assert "Error" not in said
    assert notebook("os.getpid() in parents or os.getpid() in ranks, len(set(ranks))").value == "(False, 2)"


def test_2_an_import_that_uses_the_gpu_may_come_before(notebook: Notebook) -> None:
    notebook("import touches_the_gpu; touches_the_gpu.kernel()")
    notebook(f"{CELL}found = gather(touches_the_gpu.kernel())")
    assert notebook("found").value == "['computed', 'computed']"


def test_3_classes_of_cells_work_on_ranks_and_in_loader_workers(notebook: Notebook) -> None:
    notebook("""
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, at): return X[at], Y[at]
class Block(nn.Module):
    def __init__(self): super().__init__(); self.layers = net()
    def forward(self, x): return self.layers(x)
data2 = DataLoader(Rows(), 8, num_workers=2); model = Block(); opt = torch.optim.AdamW(model.parameters(), 0.01)""")
    notebook(CELL + LOOP.replace("data", "data2"), 60)
    assert notebook("type(model).__name__, alike(model, alone(1, 16))").value == "('Block', True)"


def test_10_predictions_are_whole_and_in_order(notebook: Notebook) -> None:
    notebook("found = nbtrain.predict(model, DataLoader(TensorDataset(X[:37]), 5), strategy='ddp', devices=2)")
    assert notebook("torch.allclose(found, model(X[:37]), atol=1e-6)").value == "True"
    notebook(f"""{CELL}
model.eval()
with torch.no_grad():
    mine = gather([model(x) for x, _ in data], of=data)""")
    assert notebook("torch.allclose(mine, model(X), atol=1e-6)").value == "True"
    notebook(f"""{CELL}
model.eval()
with torch.no_grad():
    named = gather([{{"out": model(x), "both": (x[:, 0], y)}} for x, y in data], of=data)""")
    assert notebook("torch.equal(named['out'], mine), torch.equal(named['both'][1], Y)").value == "(True, True)"


@pytest.fixture(scope="module")
def with_libraries() -> Iterator[Kernel]:
    with kernel_with("hugging_face", HF_HUB_OFFLINE="1") as kernel:
        assert kernel.run(START, 120).error is None
        yield kernel


def test_5_adapters_on_a_frozen_base_of_each_ranks_own_device(with_libraries: Kernel) -> None:
    """LoRA on weights that are not trained, some of them in eight bits, as a quantised base has them."""
    notebook = Notebook(with_libraries, "")
    notebook(
        """
from transformers import GPT2Config, GPT2LMHeadModel
from peft import LoraConfig, get_peft_model
config = GPT2Config(**SMALL)
tokens = torch.randint(0, 61, (32, 12)); batches = DataLoader(TensorDataset(tokens), 4)
def made():
    torch.manual_seed(3); base = GPT2LMHeadModel(config)
    base.register_buffer("in_eight_bits", torch.randint(-127, 127, (9,), dtype=torch.int8))
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True))
    return tuned, torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], 0.01)
tuned, opt = made(); reference, ref = made()
for at in range(0, 32, 8):
    ref.zero_grad(); reference(input_ids=tokens[at:at + 8], labels=tokens[at:at + 8]).loss.backward(); ref.step()""",
        120,
    )
    said = notebook(
        """
%%distributed --strategy ddp --devices 2
device_map = {"": device}
for (ids,) in batches:
    loss = tuned(input_ids=ids, labels=ids).loss
    opt.zero_grad(); loss.backward(); opt.step()""".lstrip(),
        120,
    )
    assert "Error" not in said.text
    assert notebook("alike(tuned, reference), str(device_map[''])").value == "(True, 'cpu')"
    notebook("%distributed stop")


def test_4_transformers_trainer_trains_on_all_ranks(with_libraries: Kernel, tmp_path: Path) -> None:
    """And not by DataParallel: made on the ranks, below --strategy none, it knows of them."""
    notebook = Notebook(with_libraries, "")
    notebook(
        f"""
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(**SMALL)
rows = [dict(input_ids=ids, labels=ids) for ids in torch.randint(0, 61, (32, 12))]
torch.manual_seed(3); model = GPT2LMHeadModel(config); before = model.lm_head.weight.clone()
def train(folder):
    args = TrainingArguments(folder, per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to="none",
                             save_strategy="no", disable_tqdm=True, seed=1)
    trainer = Trainer(model=model, args=args, train_dataset=rows); trainer.train()
    return args.world_size, trainer.state.global_step
found = nbtrain.run(train, {str(tmp_path)!r}, strategy="none", devices=2)""",
        180,
    )
    assert notebook("found, bool((model.lm_head.weight != before).any())").value == "((2, 4), True)"
    assert notebook("model(input_ids=rows[0]['input_ids'][None]).logits.shape").value == "torch.Size([1, 12, 61])"
    # In the notebook itself, where it sees two cards and no ranks, it says what it is about to do, once.
    alone = """
args = TrainingArguments(FOLDER, per_device_train_batch_size=4, max_steps=1, use_cpu=True, report_to="none",
                         save_strategy="no", disable_tqdm=True)
args._n_gpu = 2
Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=rows).train();"""
    first = notebook(alone.replace("FOLDER", repr(str(tmp_path))), 60).text
    assert "this Trainer sees 2 GPUs and no ranks, so it trains by DataParallel" in first
    assert "DataParallel" not in notebook(alone.replace("FOLDER", repr(str(tmp_path))), 60).text
    notebook("%distributed stop")
