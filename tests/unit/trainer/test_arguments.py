"""Every `Trainer(…)` call that documentation of any version writes is understood: as a line of %%distributed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nbtrain.errors import NbtrainError
from nbtrain.trainer.module import Module
from nbtrain.trainer.saved_trainer import SavedTrainer
from nbtrain.trainer.strategies import BY_NAME, DeepSpeedStrategy, FSDPStrategy
from nbtrain.trainer.trainer import Trainer


class Block: ...


class Net(Module):
    def __init__(self, width: int, act: type[nn.Module] = nn.GELU, where: Path = Path()) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(width, 1), act())


def test_an_argument_that_a_checkpoint_does_not_hold_is_asked_for(tmp_path: Path) -> None:
    trainer = SavedTrainer()
    trainer.module = net = Net(2, nn.ReLU, Path("data"))
    trainer.save_checkpoint(tmp_path / "net", weights_only=True)
    with pytest.raises(NbtrainError, match=r"not act: write Net\.load_from_checkpoint\(path, act=…\)"):
        Net.load_from_checkpoint(tmp_path / "net")
    found = Net.load_from_checkpoint(tmp_path / "net", act=nn.ReLU)
    assert (found.hparams.width, found.hparams.where, type(found.layers[1])) == (2, Path("data"), nn.ReLU)
    assert found.layers[0].weight.equal(net.layers[0].weight)


CALLS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"devices": None}, ""),
    ({"devices": 3}, "--devices 3"),
    ({"devices": "3"}, "--devices 3"),
    ({"devices": -1, "accelerator": "gpu"}, "--accelerator gpu --devices -1"),
    ({"devices": "1, 3", "accelerator": "gpu"}, "--accelerator gpu --devices [1,3]"),
    ({"devices": [1, 3], "accelerator": "cuda"}, "--accelerator cuda --devices [1,3]"),
    ({"devices": range(4), "accelerator": "gpu"}, "--accelerator gpu --devices [0,1,2,3]"),
    ({"devices": 4, "strategy": "ddp"}, "--strategy ddp --devices 4"),
    ({"devices": 4, "strategy": "ddp_find_unused_parameters_true"}, "--strategy ddp --devices 4"),
    ({"devices": 4, "strategy": "ddp_spawn"}, "--strategy ddp_spawn --devices 4"),
    ({"devices": 4, "strategy": "nbtrain_fsdp"}, "--strategy fsdp --devices 4"),
    ({"devices": 4, "strategy": "fsdp_native"}, "--strategy fsdp --devices 4"),
    ({"devices": 4, "strategy": "deepspeed_stage_3_offload"}, "--strategy deepspeed_stage_3_offload --devices 4"),
    ({"devices": 4, "strategy": "fsdp --wrap Block"}, "--strategy fsdp --wrap Block --devices 4"),
    ({"devices": 8, "accelerator": "tpu"}, "--accelerator tpu --devices 8"),
    ({"precision": "bf16-mixed"}, "--precision bf16-mixed"),
    ({"precision": 16}, "--precision 16-mixed"),
    ({"precision": "32-true"}, "--precision 32"),
    ({"precision": 32}, "--precision 32"),
    ({"precision": None}, ""),
    ({"use_distributed_sampler": False}, "--no-sampler"),
    ({"strategy": FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True), "devices": 2},
     "--strategy fsdp --sharding SHARD_GRAD_OP --cpu-offload --devices 2"),
    ({"strategy": FSDPStrategy(auto_wrap_policy={Block}, limit_all_gathers=False), "devices": 2},
     "--strategy fsdp --wrap Block --no-limit-all-gathers --devices 2"),
    ({"strategy": DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True), "devices": 2},
     "--strategy deepspeed --stage 3 --offload-optimizer cpu --offload-parameters cpu --devices 2"),
    ({"strategy": DeepSpeedStrategy(config="ds.json"), "devices": 2},
     "--strategy deepspeed --config ds.json --devices 2"),
]  # fmt: skip
OLD: list[tuple[dict[str, Any], str, str]] = [
    ({"gpus": 4}, "--accelerator gpu --devices 4", "accelerator='gpu', devices=4"),
    ({"gpus": "0"}, "--accelerator gpu --devices [0]", "accelerator='gpu'"),
    ({"gpus": [0, 2]}, "--accelerator gpu --devices [0,2]", "devices=[0, 2]"),
    ({"gpus": -1}, "--accelerator gpu --devices -1", "devices=-1"),
    ({"gpus": 4, "accelerator": "ddp"}, "--strategy ddp --accelerator gpu --devices 4", "strategy='ddp'"),
    ({"gpus": 2, "accelerator": "dp"}, "--strategy dp --accelerator gpu --devices 2", "strategy='dp'"),
    ({"gpus": 1, "accelerator": "horovod"}, "--strategy horovod --accelerator gpu --devices 1", "strategy='horovod'"),
    ({"gpus": 2, "distributed_backend": "ddp"}, "--strategy ddp --accelerator gpu --devices 2", "strategy='ddp'"),
    ({"gpus": 4, "accelerator": "ddp", "plugins": "ddp_sharded"},
     "--strategy ddp_sharded --accelerator gpu --devices 4", "strategy='ddp_sharded'"),
    ({"gpus": 4, "plugins": "deepspeed", "precision": 16},
     "--strategy deepspeed --accelerator gpu --devices 4 --precision 16-mixed", "strategy='deepspeed'"),
    ({"gpus": 4, "plugins": [BY_NAME["DeepSpeedPlugin"](stage=3, cpu_offload=True)]},
     "--strategy deepspeed --stage 3 --offload-optimizer cpu --accelerator gpu --devices 4", "--stage 3"),
    ({"gpus": 2, "plugins": BY_NAME["DDPShardedPlugin"]()},
     "--strategy sharded --accelerator gpu --devices 2", "sharded"),
    ({"gpus": 2, "plugins": [BY_NAME["RPCSequentialPlugin"](balance=[2, 1])]},
     "--strategy pipeline --balance 2,1 --accelerator gpu --devices 2", "--balance 2,1"),
    ({"tpu_cores": 8}, "--accelerator tpu --devices 8", "accelerator='tpu', devices=8"),
    ({"num_processes": 2, "accelerator": "ddp_cpu"}, "--strategy ddp --accelerator cpu --devices 2", "strategy='ddp'"),
    ({"replace_sampler_ddp": False}, "--no-sampler", "use_distributed_sampler=False"),
    ({"resume_from_checkpoint": "a/b"}, "", "ckpt_path='a/b'"),
    ({"checkpoint_callback": False}, "", "enable_checkpointing=False"),
    ({"auto_lr_find": True}, "", "callbacks=[LearningRateFinder()]"),
    ({"auto_lr_find": "rate"}, "", "callbacks=[LearningRateFinder()]"),
    ({"auto_scale_batch_size": "power"}, "", "callbacks=[BatchSizeFinder()]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "line"), CALLS)
def test_todays_calls(given: dict[str, Any], line: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Trainer(**given)._line == line


@pytest.mark.parametrize(("given", "line", "today"), OLD)
def test_old_calls_are_answered_with_todays(given: dict[str, Any], line: str, today: str) -> None:
    with pytest.warns(FutureWarning) as said:
        assert Trainer(**given)._line == line
    assert any(today in str(one.message) for one in said)


@pytest.mark.parametrize(("given", "word"), [
    ({"num_nodes": 2}, "count all of them in devices"),
    ({"stratgy": "ddp"}, "no argument 'stratgy'.*strategy"),
    ({"devices": True}, "how many?"),
    ({"plugins": "deep"}, "A strategy is strategy='NAME'"),
    ({"profiler": "simple"}, "where time goes"),
    ({"gradient_clip_algorithm": "nrm"}, "'norm' or 'value'"),
    ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "interval=0.5 is no number of batches"),
    ({"check_val_every_n_epoch": None}, "val_check_interval=None is no number of batches"),
])  # fmt: skip
def test_what_is_not_there_is_said(given: dict[str, Any], word: str) -> None:
    with pytest.raises(NbtrainError, match=word):
        Trainer(**given)


def test_what_makes_no_difference_here_is_taken_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(weights_summary="top", progress_bar_refresh_rate=0, terminate_on_nan=True)
