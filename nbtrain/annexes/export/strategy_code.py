"""What a script says itself that nbtrain does on the ranks: plain torch, a few lines for each strategy.

Its own names begin with an underscore, so that they are none of the notebook's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbtrain.annexes.export import deepspeed_code
from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import RunSpec

PROCESSES = """
import os
import random as _random
import sys
if "RANK" in os.environ and "PYTHONHASHSEED" not in os.environ:  # all processes have one order of a set
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
import numpy as _numpy
import torch
from torch.utils._pytree import tree_map as _mapped
_RANK, _WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
_DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
_RANDOM = [(torch.get_rng_state, torch.set_rng_state), (_random.getstate, _random.setstate)]
_RANDOM.append((_numpy.random.get_state, _numpy.random.set_state))
if _DEVICE.type == "cuda":
    torch.cuda.set_device(_DEVICE)
    _RANDOM.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
if _WORLD_SIZE > 1:
    torch.distributed.init_process_group("nccl" if _DEVICE.type == "cuda" else "gloo")
if _RANK:
    print = lambda *values, **options: None  # one process speaks for all

def _gathered(value):
    found = [value] * _WORLD_SIZE
    if _WORLD_SIZE > 1:
        torch.distributed.all_gather_object(found, value)
    return found

def _random_states(new=()):  # takes those, and returns what they were
    old = [get() for get, _ in _RANDOM]
    for (_, put), state in zip(_RANDOM, new):
        put(state)
    return old

_random_states(_gathered(_random_states())[0])  # all draw the same until the cell's first batch,
_ALIKE = []  # and from there the order of batches, beside numbers of their own, as for dropout
_MODELS = None  # names of the cell's models, when it has begun
_iter, _len = torch.utils.data.DataLoader.__iter__, torch.utils.data.DataLoader.__len__
"""
LOADERS = """

def _dealt(loader, trains=True):  # for a loop that surely trains, or surely evaluates
    if _MODELS is not None and isinstance(loader, torch.utils.data.DataLoader):
        loader._trains = trains
    return loader

def _loop(loader):  # one that trains has this process's share of the batches, and one that evaluates has all
    training = [globals()[name].training for name in _MODELS]
    trains = loader.__dict__.pop("_trains", torch.is_grad_enabled() and (any(training) or not training))
    stream, sampler = isinstance(loader.dataset, torch.utils.data.IterableDataset), loader.batch_sampler
    if stream and trains and _WORLD_SIZE > 1:
        raise TypeError("a stream cannot be dealt out: have a data set with indices")
    own = stream or sampler is None or getattr(getattr(sampler, "sampler", None), "num_replicas", 1) > 1
{once}    share, loader._shares = (_RANK, _WORLD_SIZE) if trains and not own else (0, 1)
    if _WORLD_SIZE > 1:
        if not _ALIKE:
            _ALIKE[:] = _random_states()
            for seed in (_numpy.random.seed, _random.seed, torch.manual_seed) if _RANK else ():
                seed((torch.initial_seed() + 7919 * _RANK) % 2**32)
        states = _random_states(_ALIKE)
        {draws}torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as a loader does itself, first
        if not own:
            loader = torch.utils.data.DataLoader(
                loader.dataset, batch_sampler=_share(sampler, share, loader._shares), collate_fn=loader.collate_fn,
                num_workers=loader.num_workers, pin_memory=loader.pin_memory, worker_init_fn=loader.worker_init_fn,
            )
        _ALIKE[:] = _random_states(states)
    return (_mapped(lambda one: one.to(_DEVICE) if hasattr(one, "to") else one, batch) for batch in _iter(loader))

def _share(sampler, share, shares):  # of each round of batches one; of an uneven last round every so manieth sample
    batches, found = [list(batch) for batch in sampler], []
    for at in range(0, len(batches), {each}):
        dealt = batches[at : at + {each}]
        samples = sum(dealt, [])
        if len(dealt) == shares and len({*map(len, dealt)}) == 1:
            found.append(dealt[share])
        elif len(dealt) == {each} or not getattr(sampler, "drop_last", False):
            samples += ({filling} * shares)[: -len(samples) % shares]
            found.append(samples[share::shares])
    return found
"""
ONCE = '    once = loader.persistent_workers and hasattr(loader, "_shares")\n'
LENGTH = """
def _length(loader):  # of the loop that was last, or else of one that trains
    shares, drops = getattr(loader, "_shares", _WORLD_SIZE), getattr(loader.batch_sampler, "drop_last", False)
    shares = shares if torch.is_grad_enabled() or hasattr(loader, "_shares") else 1
    return _len(loader) // {each} if drops else -(-_len(loader) // {each})
"""
BF16 = """
def _in_bf16(own):  # inside of the model; what it returns is in full precision
    def forward(model, *args, **kwargs):
        with torch.autocast(_DEVICE.type, torch.bfloat16):
            found = own.__func__(model, *args, **kwargs)
        return _mapped(lambda one: one.float() if torch.is_tensor(one) and one.is_floating_point() else one, found)

    return forward.__get__(own.__self__)
"""
FOLLOW = """
    for one in optimizers:
        one.load_state_dict(one.state_dict())  # what earlier cells have stepped follows its parameters"""
SINGLE = """
if _WORLD_SIZE > 1:
    sys.exit("one process trains this model: python, and not torchrun; %%distributed -s ddp has a script for several")

def _prepared(model, *optimizers):
    model.to(_DEVICE){bf16}{follow}
"""
DDP = """
def _prepared(model, *optimizers, methods=()):  # in its place: what is called goes through DistributedDataParallel
    model.to(_DEVICE){bf16}{follow}
    if _WORLD_SIZE == 1 or not any(p.requires_grad for p in model.parameters()):
        return
    held, calls = torch.nn.ModuleList([model]), []
    held.forward = lambda own, *args, **kwargs: own(*args, **kwargs)
    replica = torch.nn.parallel.DistributedDataParallel(held{buckets})
{hook}\
    for name in ("forward", *methods):
        def call(model, *args, _own=getattr(model, name).__func__, **kwargs):
            if calls or model is not held[0] or not torch.is_grad_enabled():
                return _own(model, *args, **kwargs)  # inside of another call, of a copy, in an evaluation
            calls.append(_own)
            try:
                return replica(_own, model, *args, **kwargs)
            finally:
                calls.clear()
        setattr(model, name, call.__get__(model))
"""
HOOK = """\
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    replica.register_comm_hook(None, default_hooks.{dtype}_compress_hook)
"""
ZERO = """
def _divided(optimizer, *schedules):  # each process keeps the state of a part of the parameters
    if _WORLD_SIZE == 1:
        return optimizer
    import inspect
    import warnings
    from torch.distributed.optim import ZeroRedundancyOptimizer

    takes = inspect.signature(type(optimizer)).parameters
    given = {name: value for name, value in optimizer.defaults.items() if name in takes}
    groups = [{name: value for name, value in one.items() if name in takes} for one in optimizer.param_groups]
    found = ZeroRedundancyOptimizer(groups, optimizer_class=type(optimizer), **given)
    for new, old in zip(found.param_groups, optimizer.param_groups):
        new.update({name: value for name, value in old.items() if name not in new})  # what schedules note there
    if optimizer.state:
        found.load_state_dict(optimizer.state_dict())
    for one in schedules:
        one.optimizer = found
    warnings.filterwarnings("ignore", "Seems like `optimizer.step")  # schedules have counted those of the other one
    return found
"""
FSDP = """
def _prepared(model, *optimizers, methods=()):  # in pieces, in its place; its optimizers have the pieces then
    model.to(_DEVICE){bf16}
    for tensor in (*model.parameters(), *model.buffers()) if _WORLD_SIZE > 1 else ():
        torch.distributed.broadcast(tensor.detach(), 0)
    before = dict(model.named_parameters())
    if _WORLD_SIZE > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import {imports}

        mesh = init_device_mesh(_DEVICE.type, {mesh})
        for part in [*model.modules()][::-1]:
            if part is model or type(part).__name__ in {wrapped}:
                fully_shard(part, mesh=mesh{policies})
    pieces = {id(before[name]): parameter for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        if optimizer.state and _WORLD_SIZE > 1:
            sys.exit("an optimizer that an earlier cell has stepped has no pieces: make it anew before this cell")
        for group in optimizer.param_groups:
            group["params"] = [pieces.get(id(parameter), parameter) for parameter in group["params"]]
"""
OF_PIECES = """
def _weights(model):
    if _WORLD_SIZE == 1:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
"""
END = """
_trained = {name: _weights(globals()[name]) for name in _MODELS}
if _RANK == 0:
    torch.save(_trained, "trained.pt")
"""
NORMS = """
for _name, _there in {norms}.items():
    _norms = _gathered(sum(p.detach().double().square().sum().item() for p in globals()[_name].parameters()) ** 0.5)
    if max(_norms) > min(_norms) * (1 + 1e-6):
        sys.exit(f"{_name}: processes have trained different weights, as gradients of a part of it were not averaged")
    print(f"{_name}: the norm of its weights is {_norms[0]:.6g}; in the notebook it was {_there}")
"""
LEAVE = """
if _WORLD_SIZE > 1:
    torch.distributed.barrier()
    if _DEVICE.type == "cpu":  # gloo's threads may outlive the interpreter, and abort it then (pytorch#190489)
        [one.flush() for one in [*globals().values(), sys.stdout] if hasattr(type(one), "flush")]
        os._exit(0)
    torch.distributed.destroy_process_group()
"""
USES = {
    "rank": "rank = _RANK",
    "world_size": "world_size = _WORLD_SIZE",
    "local_rank": 'local_rank = int(os.environ.get("LOCAL_RANK", 0))',
    "device": "device = _DEVICE",
    "barrier": "def barrier():\n    _gathered(0)",
    "log": "def log(*, sync=False, **values):\n"
    '    print(*(f"{name} {float(value):.6g}" for name, value in values.items()))',
    "reduce": """def reduce(value, op="mean"):
    found = value.detach().clone() if torch.is_tensor(value) else torch.tensor(float(value), device=_DEVICE)
    if _WORLD_SIZE > 1:
        torch.distributed.all_reduce(found, getattr(torch.distributed.ReduceOp, {"mean": "SUM"}.get(op, op.upper())))
    found = found / _WORLD_SIZE if op == "mean" else found
    return found if torch.is_tensor(value) else found.item()""",
    "gather": """def gather(value, of=None):  # of a loop that evaluates each process has all
    if of is not None:
        return torch.cat(value) if isinstance(value, list) else value
    return _gathered(value)""",
    "whole": """def whole(*objects, gradients=False):  # every process has all of it
    from contextlib import nullcontext

    return nullcontext(objects[0] if len(objects) == 1 else objects)""",
    "resumable": "resumable = iter",
    "save": """def save(path, *_, **__):  # the weights, in a file; every process has to call it
    found = {name: _weights(globals()[name]) for name in _MODELS}
    if _RANK == 0:
        path = os.path.abspath(path)
        if os.path.isdir(path):
            print(f"{path} is a folder, as the notebook's save makes it: the weights go to {path}.pt")
            path += ".pt"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(found, path + ".part")
        os.replace(path + ".part", path)""",
}
"""names that a cell has on a rank → a function or value of a script"""
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


def refuse(run: RunSpec) -> None:
    """What has no plain form."""
    if (why := NONE.get(run.strategy)) is not None:
        raise NotSupported(f"export: --strategy {run.strategy} has no plain form: {why}")
    if run.strategy not in FORMS:
        raise NotSupported(f"export: {run.strategy} is a strategy of your own: a script cannot have it without nbtrain")
    if run.precision not in ("32", "bf16-mixed"):
        raise NotSupported(f"export: --precision {run.precision}: a script may have 32 or bf16-mixed")


def code(run: RunSpec, stepped: bool) -> list[str]:
    """What a script has of the strategy, in parts. `stepped`: earlier cells have trained."""
    mixed = run.precision == "bf16-mixed"
    parts = [*([BF16] if mixed else []), *FORMS[run.strategy](run)]
    computes = "\n    model.forward = _in_bf16(model.forward)" if mixed else ""
    return [part.replace("{bf16}", computes).replace("{follow}", FOLLOW if stepped else "") for part in parts]


def loaders(run: RunSpec, text: str) -> str:
    """What deals batches out. `text`: of the notebook, which says what loaders it has."""
    text_of_loaders = LOADERS + (LENGTH if "len(" in text else "")
    persistent = "persistent_workers" in text
    text_of_loaders = text_of_loaders.replace("{once}", ONCE if persistent else "").replace(
        "{draws}", "once or " if persistent else ""
    )
    if not run.sampler:  # every process sees all batches
        text_of_loaders = text_of_loaders.replace("(_RANK, _WORLD_SIZE)", "(0, 1)").replace(
            '"_shares", _WORLD_SIZE', '"_shares", 1'
        )
    return text_of_loaders.replace("{each}", "1" if run.split_batches else "shares").replace(
        "{filling}", "samples" if run.split_batches else "sum(batches[:shares], [])"
    )


def _replica(run: RunSpec) -> str:
    size, dtype = run.options.get("bucket_mb", 25), run.options.get("comm_dtype", "none")
    hook = HOOK.replace("{dtype}", dtype) if dtype in ("bf16", "fp16") else ""
    return DDP.replace("{hook}", hook).replace("{buckets}", f", bucket_cap_mb={size}" if size != 25 else "")


def _in_pieces(run: RunSpec) -> str:
    options = run.options
    sharding, replicas = options.get("sharding", "FULL_SHARD"), options.get("replicas", 0)
    two_ways = {"HYBRID_SHARD": f"({replicas}, _WORLD_SIZE // {replicas})", "NO_SHARD": "(_WORLD_SIZE, 1)"}
    mesh = f'{two_ways[sharding]}, mesh_dim_names=("replicas", "ranks")' if sharding in two_ways else "(_WORLD_SIZE,)"
    policies = ", reshard_after_forward=False" if sharding == "SHARD_GRAD_OP" else ""
    dtype = DTYPES.get(options.get("comm_dtype", "none"), "")
    if dtype == "torch.float32":
        policies += f", mp_policy=MixedPrecisionPolicy(reduce_dtype={dtype})"
    elif dtype:
        output_dtype = "torch.float32 if part is model else None"
        policies += f", mp_policy=MixedPrecisionPolicy({dtype}, {dtype}, output_dtype={output_dtype})"
    code = FSDP.replace("{mesh}", mesh).replace("{policies}", policies).replace("{wrapped}", repr(_wrapped(options)))
    return code.replace("{imports}", "MixedPrecisionPolicy, fully_shard" if dtype else "fully_shard")


def _wrapped(options: Mapping[str, Any]) -> tuple[str, ...]:
    named = options.get("wrap") or ()
    named = named if isinstance(named, list | tuple | set | frozenset) else (named,)
    if not all(isinstance(layer, type | str) for layer in named):
        raise NotSupported("export: --wrap with a rule has no plain form; name the classes, --wrap Block,Head")
    return tuple(sorted(layer if isinstance(layer, str) else layer.__name__ for layer in named))


DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
FORMS: Mapping[str, Callable[[RunSpec], list[str]]] = {
    "single": lambda run: [SINGLE],
    "ddp": lambda run: [_replica(run)],
    "zero1": lambda run: [_replica(run), ZERO],
    "fsdp": lambda run: [_in_pieces(run), OF_PIECES],
    "deepspeed": deepspeed_code.code,
}
