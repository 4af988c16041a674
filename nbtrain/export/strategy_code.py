"""What a script says itself that nbtrain does on the ranks: plain torch, a few lines for each strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbtrain.errors import NotSupported
from nbtrain.export import accumulation

PROCESSES = '''
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cuda":
    torch.cuda.set_device(DEVICE)
if WORLD_SIZE > 1:
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
if RANK:

    def print(*values, **options):
        """One process speaks for all."""
'''

LEAVE = """
if WORLD_SIZE > 1:
    dist.barrier()
    if DEVICE.type == "cpu":  # gloo's threads may outlive the interpreter, and abort it then (pytorch#190489)
        for one in [*globals().values()]:
            if hasattr(one, "close") and hasattr(one, "flush") and one not in (sys.stdout, sys.stderr):  # files
                one.close()
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()
"""

ALONE = """
if WORLD_SIZE > 1:
    sys.exit("one process trains this model: python, and not torchrun; %%distributed -s ddp has a script for several")
"""

PRECISION = """
def compute_in(model, dtype):
    # Inside of the model; what it returns is in full precision again.
    forward = torch.autocast(DEVICE.type, dtype)(model.forward)
    model.forward = lambda *args, **kwargs: full(forward(*args, **kwargs))


def full(value):
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        parts = [full(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        for name in value:
            value[name] = full(value[name])
    return value
"""

SINGLE = """
def prepared(model):
    return model.to(DEVICE)
"""

DDP = '''
class Replica(torch.nn.parallel.DistributedDataParallel):
    """What the model itself has is there, too, and names of weights are the model's."""

    def __init__(self, model):
        super().__init__(model{buckets})
{hook}        self.__dict__["made"] = True

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():  # an evaluation, of one process perhaps
            return self.module(*args, **kwargs)
{waits}        return super().forward(*args, **kwargs)

    def named_parameters(self, *args, **kwargs):
        return self.module.named_parameters(*args, **kwargs)

    def named_modules(self, *args, **kwargs):
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)

    def __getitem__(self, place):
        return self.module[place]

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.module, name)
        is_own = callable(getattr(type(self.module), name, None)) and not hasattr(torch.nn.Module, name)
        return self.averaging(found) if is_own and torch.is_grad_enabled() else found

    def averaging(self, method):
        """It goes through the replica's own call, which has the gradients averaged."""

        def forward(*args, **kwargs):
            self.module.__dict__.pop("forward")
            self.module.__dict__.update(before)
            return method(*args, **kwargs)

        def call(*args, **kwargs):
            self.module.forward = forward
            return self(*args, **kwargs)

        before = {name: one for name, one in vars(self.module).items() if name == "forward"}
        return call

    def __setattr__(self, name, value):
        if self.__dict__.get("made") and name not in self.__dict__:
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)



def prepared(model):
    model.to(DEVICE)
    same_weights(model)
    trained = any(p.requires_grad for p in model.parameters())
    return Replica(model) if WORLD_SIZE > 1 and trained else model
'''

SENT_IN = '''
COMM_DTYPE = {dtype}


def sent_in(_, bucket):
    """Gradients are averaged in COMM_DTYPE."""
    own = bucket.buffer()
    sent = (own.to(COMM_DTYPE) if own.is_floating_point() else own) / WORLD_SIZE
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: own.copy_(done.value()[0]))
'''

FSDP = '''
def prepared(model, *optimizers):
    """Cut into pieces in its place; its optimizers have the pieces then."""
    model.to(DEVICE)
    same_weights(model)
    before = dict(model.named_parameters())
    if WORLD_SIZE > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import {imports}

        mesh = init_device_mesh(DEVICE.type, {mesh})
        for part in [*model.modules()][::-1]:
            if part is model or type(part).__name__ in WRAPPED:
                fully_shard(part, mesh=mesh{policies})
    sharded = {id(before[name]): parameter for name, parameter in model.named_parameters()}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = [sharded.get(id(parameter), parameter) for parameter in group["params"]]
    return model
'''

ZERO = '''
def shared_out(optimizer, *schedules):
    """Each process keeps the state of a part of the parameters. `schedules`: those that know the optimizer already."""
    if WORLD_SIZE == 1:
        return optimizer
    from inspect import signature

    from torch.distributed.optim import ZeroRedundancyOptimizer

    takes = signature(type(optimizer)).parameters
    given = {name: value for name, value in optimizer.defaults.items() if name in takes}
    groups = [{name: value for name, value in group.items() if name in takes} for group in optimizer.param_groups]
    shared = ZeroRedundancyOptimizer(groups, optimizer_class=type(optimizer), **given)
    for one in schedules:
        one.optimizer = shared
    return shared
'''

WEIGHTS = """
def weights(model):
    return model.state_dict()
"""

WEIGHTS_IN_PIECES = """
def weights(model):
    if WORLD_SIZE == 1:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
"""

COMPARED = """
def compare(name, found):
    # With the notebook as it was when this script was written.
    size, wanted = NOTEBOOK[name]
    far = abs(fingerprint(found)[1] - wanted) / max(size, 1e-12)
    if far < {tolerance}:
        print(f"{name}: trained as in the notebook")
    else:
        print(f"{name}: trained differently than in the notebook, by {far:.1g} of its size")
"""

USES = {
    "rank": "rank = RANK",
    "world_size": "world_size = WORLD_SIZE",
    "local_rank": 'local_rank = int(os.environ.get("LOCAL_RANK", 0))',
    "device": "device = DEVICE",
    "barrier": "def barrier():\n    if WORLD_SIZE > 1:\n        dist.barrier()",
    "log": "def log(*, sync=False, **values):\n"
    '    print(*(f"{name} {float(value):.6g}" for name, value in values.items()))',
    "reduce": '''def reduce(value, op="mean"):
    """The processes' values as one."""
    found = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value), device=DEVICE)
    if WORLD_SIZE > 1:
        dist.all_reduce(found, getattr(dist.ReduceOp, {"mean": "SUM"}.get(op, op.upper())))
        found = found / WORLD_SIZE if op == "mean" else found
    return found if isinstance(value, torch.Tensor) else found.item()''',
    "gather": '''def gather(value, of=None):
    """The processes' values, in order of rank; of a loop that evaluates each process has all."""
    if of is not None:
        return torch.cat(value) if isinstance(value, list) else value
    found = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(found, value)
    return found''',
    "resumable": "def resumable(items):\n    return items",
    "save": '''def save(path, *_, **__):
    """The weights, in a file; every process has to call it."""
    found = {name: weights(globals()[name]) for name in MODELS}
    if RANK == 0:
        path = os.path.abspath(path)
        if os.path.isdir(path):
            print(f"{path} is a folder, as the notebook's save makes it: the weights go to {path}.pt")
            path += ".pt"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(found, path + ".part")
        os.replace(path + ".part", path)''',
}
"""names that a cell has on a rank → a function or value of a script"""


@dataclass(frozen=True)
class Form:
    """The plain form of a strategy."""

    code: tuple[str, ...]
    optimizer: str = ""
    """a function that each optimizer goes through"""
    engine: bool = False
    """which takes the model and the optimizer, and gives both"""
    late: bool = False
    """models are prepared in place, after all statements: these find weights as the notebook does"""
    statistics: bool = False
    """those of batch norm are rank 0's"""
    synchronize: str = ""
    """lines before a backward that only ends with a step where it is due"""

    def parts(self, accumulate: int) -> list[str]:
        waits = accumulation.REPLICA_WAITS if accumulate > 1 else ""
        return [one.replace("{waits}", waits) for one in self.code]


FORMS: dict[str, Callable[[dict[str, Any]], Form]] = {
    "single": lambda options: Form((ALONE, SINGLE, WEIGHTS)),
    "ddp": lambda options: Form((*_replica(options), WEIGHTS), statistics=True),
    "zero1": lambda options: Form((*_replica(options), ZERO, WEIGHTS), "shared_out", statistics=True),
    "fsdp": lambda options: Form(
        (_wrapped(options), _divided(options), WEIGHTS_IN_PIECES), late=True, synchronize=accumulation.PIECES_WAIT
    ),
}
NONE = {
    "pipeline": "torch's pipelining wants the loop to be a schedule of its own: -s fsdp divides the weights, too",
    "sharded": "no library has it as it is here: -s zero1 or fsdp",
    "dp": "one process with all devices: -s ddp, which torch's documentation recommends instead",
    "ddp2": "no library has it: -s ddp",
    "horovod": "it has a launcher of its own: -s ddp is the same training",
    "xla": "it wants TPUs and torch_xla: -s ddp",
    "none": "the cell is written for torchrun already: copy it into a file, with the cells that it reads",
}
"""strategies without a plain form → why, and which to take"""


def _wrapped(options: dict[str, Any]) -> str:
    named = options.get("wrap") or ()
    named = named if isinstance(named, list | tuple | set | frozenset) else (named,)
    if not all(isinstance(one, type | str) for one in named):
        raise NotSupported("export: --wrap with a rule has no plain form; name the classes, --wrap Block,Head")
    names = tuple(sorted(one if isinstance(one, str) else one.__name__ for one in named))
    return f'\nWRAPPED = {names!r}\n"""classes whose modules are sharded by themselves"""\n'


def _dtype(options: dict[str, Any]) -> str:
    """In which gradients are sent; empty: as they are."""
    return {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}.get(
        options.get("comm_dtype", "none"), ""
    )


def _replica(options: dict[str, Any]) -> tuple[str, ...]:
    dtype, size = _dtype(options), options.get("bucket_mb", 25)
    hook = "        self.register_comm_hook(None, sent_in)\n" if dtype else ""
    replica = DDP.replace("{hook}", hook).replace("{buckets}", f", bucket_cap_mb={size}" if size != 25 else "")
    return (*([SENT_IN.replace("{dtype}", dtype)] if dtype else []), replica)


def _divided(options: dict[str, Any]) -> str:
    dtype, sharding = _dtype(options), options.get("sharding", "FULL_SHARD")
    replicas = options.get("replicas", 0)
    two_ways = {"HYBRID_SHARD": f"({replicas}, WORLD_SIZE // {replicas})", "NO_SHARD": "(WORLD_SIZE, 1)"}
    mesh = f'{two_ways[sharding]}, mesh_dim_names=("replicas", "ranks")' if sharding in two_ways else "(WORLD_SIZE,)"
    policies = ", reshard_after_forward=False" if sharding == "SHARD_GRAD_OP" else ""
    if dtype == "torch.float32":
        policies += f", mp_policy=MixedPrecisionPolicy(reduce_dtype={dtype})"
    elif dtype:
        whole = "torch.float32 if part is model else None"
        policies += f", mp_policy=MixedPrecisionPolicy({dtype}, {dtype}, output_dtype={whole})"
    code = FSDP.replace("{mesh}", mesh).replace("{policies}", policies)
    return code.replace("{imports}", "MixedPrecisionPolicy, fully_shard" if dtype else "fully_shard")
