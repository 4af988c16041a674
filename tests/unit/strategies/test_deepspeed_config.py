"""What a user's flags, config and environment come to, and what is refused. No ranks are needed for that."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.notebook.magics.line.strategy_flags import flags_of
from nbtrain.strategies.deepspeed import DeepSpeed
from nbtrain.strategies.deepspeed.config import ENVIRONMENT, build, decided

Options = DeepSpeed.Options


def settings(precision: str = "32", **options: Any) -> dict[str, Any]:
    return build(Options(**options), precision)[0]


def test_the_defaults_hide_nothing() -> None:
    made = settings()
    assert made["zero_optimization"]["stage"] == 2
    assert made["gradient_clipping"] == 0.0  # DeepSpeed's own default is 1.0
    assert made["managed_gradient_accumulation"] is False
    assert made["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(("options", "path", "value"), [
    ({"stage": 3}, "zero_optimization.stage", 3),
    ({"offload_optimizer": "cpu"}, "zero_optimization.offload_optimizer.device", "cpu"),
    ({"stage": 3, "offload_parameters": "cpu"}, "zero_optimization.offload_param.device", "cpu"),
    ({"allgather_bucket_size": 1000}, "zero_optimization.allgather_bucket_size", 1000),
    ({"reduce_bucket_size": 2000}, "zero_optimization.reduce_bucket_size", 2000),
    ({"overlap_comm": True}, "zero_optimization.overlap_comm", True),
    ({"contiguous_gradients": False}, "zero_optimization.contiguous_gradients", False),
    ({"partition_activations": True}, "activation_checkpointing.partition_activations", True),
    ({"cpu_checkpointing": True}, "activation_checkpointing.cpu_checkpointing", True),
])  # fmt: skip
def test_each_flag_is_a_word_of_the_config(options: dict[str, Any], path: str, value: object) -> None:
    found: Any = settings(**options)
    for name in path.split("."):
        found = found[name]
    assert found == value


def test_every_option_is_a_flag_and_has_a_line() -> None:
    flags = flags_of(DeepSpeed)
    assert {one.name for one in dataclasses.fields(Options)} == {flag.field for flag in flags.values()}
    assert "--no-contiguous-gradients" in flags


def test_a_config_overrides_our_defaults_and_is_left_alone() -> None:
    mine = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 500}, "gradient_clipping": 0.3}
    before = json.dumps(mine)
    made = settings(config=mine)
    assert made["zero_optimization"]["stage"] == 3
    assert made["zero_optimization"]["reduce_bucket_size"] == 500
    assert made["gradient_clipping"] == 0.3
    assert json.dumps(mine) == before


def test_what_a_config_decides_is_said() -> None:
    """A flag that says its default looks as if it had been left out."""
    mine = {"zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": False}}
    made = Options(config=mine, stage=2)
    assert settings(config=mine, stage=2)["zero_optimization"]["stage"] == 3
    assert decided(made) == "from the config: --stage 3, --overlap-comm, --no-contiguous-gradients"
    assert decided(Options(config=mine, stage=3)) == "from the config: --overlap-comm, --no-contiguous-gradients"
    assert decided(Options(config={"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}})) is None
    assert decided(Options(stage=3)) is None


def test_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text('{"zero_optimization": {"stage": 1}}')
    two.write_text('{"zero_optimization": {"stage": 3}}')
    assert settings(config=str(one))["zero_optimization"]["stage"] == 1
    monkeypatch.setenv(ENVIRONMENT, str(two))
    assert settings()["zero_optimization"]["stage"] == 3
    assert settings(config=str(one))["zero_optimization"]["stage"] == 1


def test_auto_is_not_given() -> None:
    made = settings(
        config={
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    )
    assert made["zero_optimization"]["reduce_bucket_size"] == Options().reduce_bucket_size
    assert made["gradient_clipping"] == 0.0


def test_precision_from_either_side() -> None:
    assert build(Options(), "bf16-true")[0]["bf16"]["enabled"] is True
    assert build(Options(config={"bf16": {"enabled": True}}), "32")[1] == "bf16-true"
    assert "bf16" not in build(Options(), "bf16-mixed")[0]
    with pytest.raises(UsageError, match=r"bf16\.enabled: leave one of them out"):
        build(Options(config={"bf16": {"enabled": True}}), "16-mixed")
    with pytest.raises(UsageError, match="torch_autocast"):
        build(Options(config={"torch_autocast": {"enabled": True}}), "bf16-mixed")


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"stage": 0}, UsageError, "--stage 0 shards nothing: that is the strategy ddp"),
    ({"stage": 4}, UsageError, "stages are 1, 2 and 3"),
    ({"reduce_bucket_size": 0}, UsageError, "--reduce-bucket-size 0"),
    ({"allgather_bucket_size": 7}, UsageError, "an even number of elements"),
    ({"config": {"zero_optimization": {"stage": 0}}}, UsageError, "stage 0 shards nothing"),
    ({"stage": 3, "config": {"zero_optimization": {"stage": 1}}}, UsageError, "--stage 3, but the config says"),
    ({"stage": 1, "overlap_comm": True}, UsageError, "--overlap-comm needs --stage 2 or 3"),
    ({"offload_parameters": "cpu"}, UsageError, "--offload-parameters cpu needs --stage 3"),
    ({"offload_optimizer": "nvme", "nvme_path": "x"}, UsageError, "--offload-optimizer nvme needs --stage 3"),
    ({"stage": 3, "offload_optimizer": "nvme"}, UsageError, "--nvme-path DIR"),
    ({"config": 3}, UsageError, "a dict or the name of a JSON file, not int"),
    ({"config": "/nowhere.json"}, UsageError, "No such file"),
    ({"config": {"gradient_accumulation_steps": 4}}, UsageError, "write --accumulate K"),
    ({"config": {"managed_gradient_accumulation": True}}, UsageError, "the loop decides"),
    ({"config": {"optimizer": {"type": "OneBitAdam"}}}, NotSupported, "1-bit optimizers do not go together"),
    ({"config": {"tensor_parallel": {"autotp_size": 2}}}, NotSupported, "tensor parallelism is not possible"),
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Options(**options)


def test_parameters_on_a_disk_need_sixteen_bits() -> None:
    options = Options(stage=3, offload_parameters="nvme", nvme_path="/tmp")
    with pytest.raises(UsageError, match="needs --precision bf16-true"):
        build(options, "32")
    assert build(options, "bf16-true")[0]["zero_optimization"]["stage3_prefetch_bucket_size"] == 0


def test_not_json(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(UsageError, match="this is not JSON"):
        Options(config=str(tmp_path / "c.json"))
