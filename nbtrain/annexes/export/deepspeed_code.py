"""`-s deepspeed` in a script: an engine with the notebook's own optimizer in it, and a loop that stays as it is."""

from __future__ import annotations

import pprint

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RunSpec

ENGINE = """
os.environ.setdefault("DS_ACCELERATOR", _DEVICE.type)
import deepspeed

_CONFIG = {config}


class _EngineOptimizer(torch.optim.Optimizer):  # as the loop knows it; its step is the engine's, which clears gradients
    def __init__(self, engine, optimizer):
        self.engine, self.inner, self.defaults = engine, optimizer, optimizer.defaults
        torch.nn.utils.clip_grad_norm_ = self.clip

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def clip(self, parameters, max_norm):  # in the engine's next step
        self.engine.optimizer.clip_grad = float(max_norm)

    def step(self):
        self.engine.step()
        self.engine.optimizer.clip_grad = _CONFIG["gradient_clipping"]

    def zero_grad(self, set_to_none=True):
        pass


def _engine(model, optimizer):  # DeepSpeed 0.19.8 or later: it hears of a plain loss.backward(), and each step() is one
    if optimizer.state:
        sys.exit("an optimizer that an earlier cell has stepped cannot be divided: make it anew before this cell")
    if _WORLD_SIZE == 1:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model.to(_DEVICE){bf16}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_CONFIG)
    return engine, _EngineOptimizer(engine, optimizer)


def _prepared(model, *optimizers, methods=()):  # one that is not trained
    model.to(_DEVICE){bf16}
"""
WEIGHTS = """
def _weights(model):
    model = getattr(model, "module", model)
    with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=_CONFIG["zero_optimization"]["stage"] == 3):
        return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
"""


def code(run: RunSpec) -> list[str]:
    from nbtrain.strategies.deepspeed import DeepSpeed, config

    settings, precision = config.build(DeepSpeed.Options(**run.options), run.precision)
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
    return [ENGINE.replace("{config}", pprint.pformat(settings, sort_dicts=False)), WEIGHTS]
