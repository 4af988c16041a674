"""`-s deepspeed` in a script: an engine with the notebook's own optimizer in it, and a loop that stays as it is."""

from __future__ import annotations

import ast
import pprint
from collections.abc import Mapping
from typing import Any

from nbtrain.errors import NotSupported
from nbtrain.export.text_edits import Edits, suites

ENGINE = '''
os.environ.setdefault("DS_ACCELERATOR", DEVICE.type)
import deepspeed

CONFIG = {config}


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer as the loop and schedules know it; its step is the engine's, which clears gradients, too."""

    def __init__(self, engine, optimizer):
        self.engine, self.inner, self.defaults = engine, optimizer, optimizer.defaults

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self):
        self.engine.step()

    def zero_grad(self, set_to_none=True):
        pass


def prepared(model):
    model.to(DEVICE)
    same_weights(model)
    return model


def with_engine(model, optimizer):
    """DeepSpeed 0.19.8 or later: it hears of a plain loss.backward(), and each step() is one."""
    if WORLD_SIZE == 1:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    return engine, EngineOptimizer(engine, optimizer)
'''
WEIGHTS = """
def weights(model):
    model = getattr(model, "module", model)
    with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=CONFIG["zero_optimization"]["stage"] == 3):
        return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
"""
CLIPPED = "# (the engine clips gradients: gradient_clipping in CONFIG)"


def code(options: dict[str, Any], precision: str) -> tuple[str, ...]:
    from nbtrain.strategies.deepspeed import DeepSpeed, config

    settings, precision = config.build(DeepSpeed.Options(**options), precision)
    for name in ("offload_param", "offload_optimizer"):
        if config.offload(settings, name) != "none":
            raise NotSupported(f"export: {name} of DeepSpeed: its own kernels step there; leave it out")
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise NotSupported(f"export: the {name} of a DeepSpeed config: make it in a cell")
    if precision not in ("32", "bf16-mixed"):
        raise NotSupported(f"export: --precision {precision} under deepspeed: a script may have 32 or bf16-mixed")
    if precision == "bf16-mixed" and settings["zero_optimization"]["stage"] == 3:
        raise NotSupported("export: --precision bf16-mixed under stage 3: take stage 2, or -s fsdp")
    return ENGINE.replace("{config}", pprint.pformat(settings, sort_dicts=False)), WEIGHTS


def clipped(text: str, namespace: Mapping[str, Any]) -> tuple[str, set[float]]:
    """The text without clipping, and the norms that gradients are clipped at: the engine has them, and not the loop."""
    tree, edits, norms = ast.parse(text), Edits(text), set[float]()
    statements = {
        id(one.value): suite for suite in suites(tree) for one in suite if isinstance(one, ast.Expr)
    }  # fmt: skip
    conditional = {
        id(one) for branch in ast.walk(tree) if isinstance(branch, ast.If) for one in ast.walk(branch)
    }  # fmt: skip
    for one in ast.walk(tree):
        name = getattr(one.func, "attr", getattr(one.func, "id", "")) if isinstance(one, ast.Call) else ""
        if name not in ("clip_grad_norm_", "clip_grad_value_"):
            continue
        assert isinstance(one, ast.Call)
        norm = _number(next((word.value for word in one.keywords if word.arg == "max_norm"), *one.args[1:2]), namespace)
        kinds = [word for word in one.keywords if word.arg == "norm_type"] or one.args[2:]
        if name != "clip_grad_norm_" or norm is None or kinds or id(one) not in statements or id(one) in conditional:
            raise NotSupported(
                f"export: {ast.unparse(one)}: DeepSpeed's engine clips each step by one and the same norm of all "
                "gradients, and returns none; write clip_grad_norm_(model.parameters(), 1.0) as a statement, or take "
                "-s fsdp"
            )
        norms.add(norm)
        alone = len(statements[id(one)]) == 1
        last = (one.end_lineno or 0, one.end_col_offset or 0)
        edits.replace((one.lineno, one.col_offset), last, "pass" if alone or _shares_line(one, text) else CLIPPED)
    return edits.text(), norms


def _shares_line(node: ast.Call, text: str) -> bool:
    lines = text.splitlines()
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[(node.end_lineno or 1) - 1].encode()[node.end_col_offset :].decode()
    return bool(before.strip()) or bool(after.split("#")[0].strip())


def _number(node: ast.expr | None, namespace: Mapping[str, Any]) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(node, ast.Name):
        value = namespace.get(node.id)
    return float(value) if isinstance(value, int | float) and value > 0 else None
