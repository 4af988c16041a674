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


@pytest.mark.sample("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp --wrap GPT2Block"])
def test_a_plain_loop_and_the_files_of_save_pretrained(notebook: Notebook, tmp_path: Path, strategy: str) -> None:
    notebook(f"%%distributed -s {strategy} -d 2\n{LOOP}", 120)
    assert notebook("alike(model, alone(8))").value == "True"
    notebook(
        f"model.save_pretrained({str(tmp_path)!r}); again = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    )
    assert notebook("alike(model, again)").value == "True"
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp --wrap GPT2Block", "deepspeed --stage 3", "pipeline"])
def test_save_pretrained_in_the_cell_writes_what_one_process_writes(
    notebook: Notebook, tmp_path: Path, strategy: str
) -> None:
    loop = LOOP.replace("**batch,", "**batch, use_cache=False,")
    size = 4 if strategy == "pipeline" else 8  # all its ranks see one batch
    notebook(f"folder = {str(tmp_path / 'there')!r}; alone({size}).save_pretrained({str(tmp_path / 'here')!r})")
    notebook(f"%%distributed -s {strategy} -d 2 --monitor off\n{loop}\nmodel.save_pretrained(folder)", 120)
    names = sorted(one.name for one in (tmp_path / "here").iterdir())
    assert sorted(one.name for one in (tmp_path / "there").iterdir()) == names
    for name in names:
        if name.endswith(".json"):
            assert (tmp_path / "here" / name).read_text() == (tmp_path / "there" / name).read_text()
    notebook("from safetensors.torch import load_file\nhere, there = (load_file(f'{one}/model.safetensors') for one in "
             f"({str(tmp_path / 'here')!r}, folder))")  # fmt: skip
    assert notebook("here.keys() == there.keys()").value == "True"
    assert notebook("all(torch.allclose(here[name], there[name], atol=1e-4) for name in here)").value == "True"
    assert notebook("alike(model, AutoModelForCausalLM.from_pretrained(folder))").value == "True"


@pytest.mark.sample("fsdp")
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed --stage 3"])
def test_adapters_are_saved_in_the_cell(notebook: Notebook, tmp_path: Path, strategy: str) -> None:
    adapted = """
import peft
def adapted():
    torch.manual_seed(1); model = GPT2LMHeadModel(GPT2Config(**SMALL))
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights="gaussian")
    model = peft.get_peft_model(model, settings)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
"""
    notebook(f"{adapted}model, opt = adapted(); folder = {str(tmp_path)!r}")
    notebook(f"%%distributed -s {strategy} -d 2 --monitor off\n{LOOP}\nmodel.save_pretrained(folder)", 120)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    again = "peft.PeftModel.from_pretrained(GPT2LMHeadModel(GPT2Config(**SMALL)), folder)"
    notebook(f"torch.manual_seed(1); again = {again}")
    adapters = "{n: p for n, p in %s.named_parameters() if 'lora' in n}"
    notebook(f"one, other = {adapters % 'model'}, {adapters % 'again'}")
    assert notebook("len(one) > 0 and all(torch.equal(one[n], other[n]) for n in one)").value == "True"


def test_save_pretrained_on_one_rank_says_that_it_needs_all(notebook: Notebook, tmp_path: Path) -> None:
    cell = f"%%distributed -s fsdp -d 2 --monitor off\n{LOOP}\nif rank == 0: model.save_pretrained({str(tmp_path)!r})"
    said = notebook.fails(cell, 120).evalue
    assert said.startswith("saving a model in pieces needs every rank: write it outside of `if rank == 0:`")


@pytest.mark.thorough
def test_a_streamed_data_set_is_seen_once_split_or_not(notebook: Notebook) -> None:
    notebook(
        "from datasets.distributed import split_dataset_by_node as split\nmany = rows.to_iterable_dataset(num_shards=4)"
    )
    seen = "seen = []\n" + LOOP.replace("    loss =", "    seen.append(batch['input_ids'])\n    loss =")
    every = "\nevery = torch.cat(gather(torch.cat(seen)))"
    for stream in ("DataLoader(many, 4)", "DataLoader(split(many, rank, world_size), 4)"):
        notebook(f"%%distributed -s ddp -d 2\n{seen.replace('in loader', f'in {stream}')}{every}", 60)
        assert notebook("sorted(every.tolist()) == sorted(tokens.tolist())").value == "True", stream


@pytest.mark.thorough
def test_trls_trainer_on_ranks(notebook: Notebook, tmp_path: Path) -> None:
    notebook(
        f"""
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
texts = ["the cat sees a mouse .", "a dog eats some bread ."] * 32
words = Tokenizer(models.WordLevel(unk_token="?")); words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["?", "<end>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="?")
sentences = datasets.Dataset.from_dict({{"text": texts}})
before = model.transformer.wte.weight.clone()
def train():
    usual = dict(report_to="none", bf16=False, save_strategy="no", disable_tqdm=True)
    settings = SFTConfig({str(tmp_path)!r}, per_device_train_batch_size=4, num_train_epochs=1, max_length=16, **usual)
    trainer = SFTTrainer(model=model, args=settings, train_dataset=sentences, processing_class=tokenizer)
    trainer.train()
    return trainer.state.global_step
"""
    )
    assert notebook("nbtrain.run(train, strategy='none', devices=2)", 120).value == "8"
    assert notebook("bool((model.transformer.wte.weight != before).any())").value == "True"


ROWS = """
import accelerate, transformers
from accelerate import Accelerator, PartialState
from transformers import Trainer, TrainingArguments
labelled = datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})
quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True, num_train_epochs=1)
"""


@pytest.mark.thorough
def test_without_a_gpu_accelerate_and_settings_count_all_ranks(notebook: Notebook, tmp_path: Path) -> None:
    """As docs/hugging_face.md has it: nothing says that the CPU is meant."""
    notebook(
        f"""{ROWS}
def train():
    args = TrainingArguments({str(tmp_path)!r}, per_device_train_batch_size=8, **quiet)
    trainer = Trainer(model=model, args=args, train_dataset=labelled)
    trainer.train()
    return args.world_size, trainer.state.log_history[-1]["step"]
found = nbtrain.run(train, strategy="none", devices=2)
""",
        120,
    )
    assert notebook("found").value == "(2, 2)"
    counted = "PartialState().num_processes, Accelerator().num_processes, os.environ['ACCELERATE_USE_CPU']"
    for first in ("", "accelerate.state.PartialState._reset_state()\n"):
        notebook(f"%%distributed -s none -d 2 --monitor off\n{first}counted = {counted}")
        assert notebook("counted").value == "(2, 2, 'true')"
    assert notebook("os.environ.get('ACCELERATE_USE_CPU'), Accelerator().num_processes").value == "(None, 1)"


def test_what_finds_one_process_among_several_ranks_is_refused_with_the_reason(notebook: Notebook) -> None:
    notebook(f"{ROWS}os.environ['ACCELERATE_USE_CPU'] = 'false'")
    cell = "%%distributed -s none -d 2 --monitor off\nPartialState._reset_state()\n"
    try:
        said = notebook.fails(f"{cell}Accelerator()", 60).evalue
        assert said.startswith("accelerate's Accelerator finds one process where there are 2, and each rank")
        assert said.endswith("Write Accelerator(cpu=True), or leave ACCELERATE_USE_CPU=false out")
        said = notebook.fails(f"{cell}TrainingArguments('out', report_to='none')").evalue
        assert said.startswith("TrainingArguments finds one process where there are 2, and each rank would train")
        assert "Write TrainingArguments(…, use_cpu=True), or leave" in said
        notebook(f"{cell}count = TrainingArguments('out', report_to='none', use_cpu=True).world_size")
        assert notebook("count").value == "2"
    finally:
        notebook("del os.environ['ACCELERATE_USE_CPU']")
    notebook("args = TrainingArguments('out', **quiet)")
    said = notebook.fails(f"{cell}Trainer(model=model, args=args, train_dataset=labelled)").evalue
    assert said.startswith("the TrainingArguments of transformers' Trainer was made where there is one process")


@pytest.mark.thorough
def test_a_trainer_of_all_ranks_stays_there_and_the_notebooks_own_go_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook(
        f"""{ROWS}
def arguments(): return TrainingArguments({str(tmp_path)!r}, per_device_train_batch_size=8, **quiet)
def make():
    trainer = Trainer(model=model, args=arguments(), train_dataset=labelled)
    trainer.train()
    return trainer, trainer.model, trainer.state.log_history
"""
    )
    said = notebook("trainer, same, history = nbtrain.run(make, strategy='none', devices=2)", 120).text
    (line,) = [line for line in said.splitlines() if "stays on the ranks" in line]
    assert "the notebook has a handle for it: it works with all 2 ranks, and would be wrong without them." in line
    assert "trainer.state.log_history" in line
    assert line.startswith("what was returned stays")
    assert notebook.fails("trainer.evaluate()").evalue.endswith("and have that return what you need")
    assert notebook("type(trainer).__name__, same is model, history[-1]['step']").value == "('Handle', True, 2)"
    cell = "%%distributed -s none -d 2 --monitor off\n"
    said = notebook(f"{cell}args = arguments()\ntrainer = Trainer(model=model, args=args, train_dataset=labelled)").text
    assert "args stays on the ranks" in said
    assert "trainer stays on the ranks" in said
    notebook(f"{cell}loss = trainer.evaluate(labelled)['eval_loss']; trainer.train()")
    notebook("here = Trainer(model=model, args=arguments(), train_dataset=labelled); here.train()", 60)
    assert notebook("here.args.world_size, here.state.global_step").value == "(1, 4)"


@pytest.mark.thorough
def test_what_an_accelerator_of_all_ranks_prepared_stays_there(notebook: Notebook) -> None:
    notebook(f"{ROWS}from torch.optim.lr_scheduler import LambdaLR\nhave = model, opt")
    cell = "%%distributed -s none -d 2 --monitor off\n"
    said = notebook(
        f"""{cell}
accelerator = Accelerator()
net, stepper, batches, rate = accelerator.prepare(model, opt, loader, LambdaLR(opt, lambda step: 1.0))
for batch in batches:
    loss = net(**batch, labels=batch["input_ids"]).loss
    accelerator.backward(loss); stepper.step(); rate.step(); stepper.zero_grad()
holder = dict(args=accelerator.gradient_accumulation_steps, rate=LambdaLR(stepper, lambda step: 1.0))
del loss, batch
""",
        60,
    ).text
    lines = [line for line in said.splitlines() if "on the ranks" in line]
    assert len(lines) == 2, lines
    assert lines[0].startswith("accelerator, stepper, batches")
    assert (
        notebook("(model, opt) == have, alike(model, alone(8)), type(stepper).__name__").value
        == "(True, True, 'Handle')"
    )
    notebook(f"{cell}for batch in batches:\n    net(**batch); break\ndel batch")
    notebook(
        """
accelerator = Accelerator()
net, stepper = accelerator.prepare(model, opt)
accelerator.backward(net(tokens[:4], labels=tokens[:4]).loss); stepper.step()
""",
        60,
    )
    assert notebook("accelerator.num_processes, net is model").value == "(1, True)"


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp --wrap GPT2Block", "deepspeed --stage 3"])
def test_what_transformers_notes_on_weights_is_no_difference_between_ranks(
    notebook: Notebook, tmp_path: Path, strategy: str
) -> None:
    """And what a strategy notes there beside it does not come home."""
    notebook(
        f"model.save_pretrained({str(tmp_path)!r}); model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "opt = torch.optim.AdamW(model.parameters(), 1e-2)\n"
        "noted = [dict(vars(p)) for p in model.parameters()]; model.train()"
    )
    cell = f"%%distributed -s {strategy} -d 2 --monitor off\n{LOOP}\ndel loss, batch"
    for _ in range(2):
        assert "differ across ranks" not in notebook(cell, 120).text
    assert notebook("any(noted) and [vars(p) for p in model.parameters()] == noted").value == "True"
    notebook("%%distributed -s none -d 2 --monitor off\npass")
    assert notebook("[vars(p) for p in model.parameters()] == noted").value == "True"
