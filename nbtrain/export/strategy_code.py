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

ALONE = '''
if WORLD_SIZE > 1:
    sys.exit("one process trains this model: python, and not torchrun; %%distributed -s ddp has a script for several")
'''

SAME_DRAWS = """
def same_draws():
    # What the notebook's statements draw is the same on all processes.
    import random

    numpy = sys.modules.get("numpy")
    states = [torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(states)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if numpy:
        numpy.random.set_state(states[2])


same_draws()
"""

LOADERS = '''
SHARED = []
"""the random numbers that all processes draw alike, as for the order of batches"""


class RankBatches:
    """Of each round of batches the one of this process; of an uneven last one, and of each batch where SPLIT is set,
    every so manieth sample."""

    def __init__(self, loader):
        self.batches, self.generator = loader.batch_sampler, loader.generator
        self.once, self.begun = loader.persistent_workers, False
        self.drop_last = getattr(loader.batch_sampler, "drop_last", False)

    def __len__(self):
        count = 1 if SPLIT else WORLD_SIZE
        return len(self.batches) // count if self.drop_last else -(-len(self.batches) // count)

    def __iter__(self):
        own = torch.get_rng_state()
        torch.set_rng_state(SHARED[0])
        if not (self.once and self.begun):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # as a loader does, first
        self.begun = True
        batches = [list(batch) for batch in self.batches]
        SHARED[0] = torch.get_rng_state()
        torch.set_rng_state(own)
        each = 1 if SPLIT else WORLD_SIZE
        for at in range(0, len(batches), each):
            found = batches[at : at + each]
            if len(found) == WORLD_SIZE and len(set(map(len, found))) == 1:
                yield found[RANK]
            elif SPLIT or len(found) == WORLD_SIZE or not self.drop_last:
                samples = [sample for batch in found for sample in batch]
                filling = samples if SPLIT else [sample for batch in batches for sample in batch]
                samples += (filling * WORLD_SIZE)[: -len(samples) % WORLD_SIZE]
                yield samples[RANK::WORLD_SIZE]


class OnDevice:
    """A loader whose batches are on this process's device."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return map(move, self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


def move(batch):
    if isinstance(batch, (list, tuple)):
        moved = [move(part) for part in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, dict):
        return {name: move(part) for name, part in batch.items()}
    return batch.to(DEVICE) if hasattr(batch, "to") else batch


DEALT = {}


def dealt(loader):
    """A loader of this process's share of the batches."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    if not SHARED:  # before the cell: as the notebook's own statements do, alike on all processes
        return OnDevice(loader)
    if WORLD_SIZE > 1 and loader not in DEALT and loader.batch_sampler is not None:
        DEALT[loader] = torch.utils.data.DataLoader(
            loader.dataset, batch_sampler=RankBatches(loader),
            num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
    return {counted}(DEALT.get(loader, loader))


class Whole(OnDevice):
    def __iter__(self):
        own = torch.get_rng_state()
        torch.set_rng_state(SHARED[0])
        batches = iter(self.loader)  # which draws a number
        SHARED[0] = torch.get_rng_state()
        torch.set_rng_state(own)
        return map(move, batches)


def whole(loader):
    """A loader that every process sees whole, as where a loop evaluates."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    return Whole(loader) if WORLD_SIZE > 1 and SHARED else OnDevice(loader)


def dealt_if_training(loader):
    """Whole where gradients are off, or all models in eval mode; else dealt."""
    trains = torch.is_grad_enabled() and any(globals()[name].training for name in MODELS)
    return dealt(loader) if trains or not MODELS else whole(loader)


def same_weights(model):
    """All processes begin with those of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()) if WORLD_SIZE > 1 else ():
        dist.broadcast(tensor.detach(), 0)


def same_random_numbers():
    """What all draw alike begins as on rank 0, and what each draws for itself, as for dropout, differs."""
    SHARED[:] = [torch.get_rng_state()]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(SHARED)
        if RANK:
            torch.manual_seed(torch.initial_seed() + RANK)
'''

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
        super().__init__(model)
        self.__dict__["made"] = True

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

FSDP = '''
def prepared(model, *optimizers):
    """Cut into pieces in its place; its optimizers have the pieces then."""
    model.to(DEVICE)
    same_weights(model)
    before = dict(model.named_parameters())
    if WORLD_SIZE > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(DEVICE.type, (WORLD_SIZE,))
        for part in [*model.modules()][::-1]:
            if part is model or type(part).__name__ in WRAPPED:
                fully_shard(part, mesh=mesh)
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
    "save": '''def save(path, **_):
    """The weights; every process has to call it."""
    found = {name: weights(globals()[name]) for name in MODELS}
    if RANK == 0:
        torch.save(found, path)''',
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
    "ddp": lambda options: Form((DDP, WEIGHTS), statistics=True),
    "zero1": lambda options: Form((DDP, ZERO, WEIGHTS), "shared_out", statistics=True),
    "fsdp": lambda options: Form(
        (_wrapped(options), FSDP, WEIGHTS_IN_PIECES), late=True, synchronize=accumulation.PIECES_WAIT
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
