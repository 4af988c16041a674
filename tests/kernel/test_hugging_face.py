"""Models, data sets and files of Hugging Face's libraries, as docs/hugging_face.md has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel
from tests.support.libraries import kernel_with
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

START = """
%load_ext nbtrain
import os, nbtrain, torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
import datasets
datasets.disable_progress_bars()
SMALL = dict(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
torch.manual_seed(0)
tokens = torch.randint(0, 61, (32, 12))
rows = datasets.Dataset.from_dict({"input_ids": tokens.tolist()}).with_format("torch")
loader = DataLoader(rows, 4)
def made():
    torch.manual_seed(1); model = GPT2LMHeadModel(GPT2Config(**SMALL))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)
def alone(size):
    model, opt = made()
    for at in range(0, 32, size):
        ids = tokens[at:at + size]
        opt.zero_grad(); model(input_ids=ids, labels=ids).loss.backward(); opt.step()
    return model
def alike(a, b): return all(torch.allclose(p, q, atol=1e-4) for p, q in zip(a.parameters(), b.parameters()))
"""
LOOP = """
for batch in loader:
    loss = model(**batch, labels=batch["input_ids"]).loss
    opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with kernel_with("hugging_face", HF_HUB_OFFLINE="1") as kernel:
        assert kernel.run(START, 120).error is None
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    made("model, opt = made()")
    yield made
    made("%distributed stop")


@pytest.mark.sample("ddp", "fsdp --wrap GPT2Block")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp --wrap GPT2Block", "deepspeed --stage 2"])
def test_a_plain_loop_and_the_files_of_save_pretrained(notebook: Notebook, tmp_path: Path, strategy: str) -> None:
    notebook(f"%%distributed -s {strategy} -d 2\n{LOOP}", 120)
    assert notebook("alike(model, alone(8))").value == "True"
    notebook(
        f"model.save_pretrained({str(tmp_path)!r}); again = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    )
    assert notebook("alike(model, again)").value == "True"
    assert (tmp_path / "model.safetensors").is_file()


def test_a_streamed_data_set_is_seen_once_split_or_not(notebook: Notebook) -> None:
    notebook(
        "from datasets.distributed import split_dataset_by_node as split\nmany = rows.to_iterable_dataset(num_shards=4)"
    )
    seen = "seen = []\n" + LOOP.replace("    loss =", "    seen.append(batch['input_ids'])\n    loss =")
    every = "\nevery = torch.cat(gather(torch.cat(seen)))"
    for stream in ("DataLoader(many, 4)", "DataLoader(split(many, rank, world_size), 4)"):
        notebook(f"%%distributed -s ddp -d 2\n{seen.replace('in loader', f'in {stream}')}{every}", 60)
        assert notebook("sorted(every.tolist()) == sorted(tokens.tolist())").value == "True", stream


def test_predictions_by_names(notebook: Notebook) -> None:
    notebook("def last(model, batch): return model(**batch).logits[:, -1]")
    notebook("found = nbtrain.predict(model, DataLoader(rows, 5), last, devices=2)", 60)
    assert notebook("torch.allclose(found, model(tokens).logits[:, -1], atol=1e-4)").value == "True"
    assert notebook("nbtrain.predict(model, rows, devices=2)['logits'].shape").value == "torch.Size([32, 12, 61])"
