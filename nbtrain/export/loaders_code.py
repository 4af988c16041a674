"""What a script says itself that nbtrain does with loaders and random numbers on the ranks."""

from __future__ import annotations

SAME_DRAWS = """
def random_states():
    import random

    numpy = sys.modules.get("numpy")
    return [torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()]


def set_random_states(states):
    import random

    numpy = sys.modules.get("numpy")
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if numpy and states[2]:
        numpy.random.set_state(states[2])


def same_draws():
    # What the notebook's statements draw is the same on all processes.
    states = random_states()
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(states)
    set_random_states(states)


same_draws()
"""

DEALS = "SHARE, SHARES = RANK, WORLD_SIZE"
ALL_SEE_ALL = "SHARE, SHARES = 0, 1  # --no-sampler: every process sees all batches"

LOADERS = '''
SHARED = []
"""the random numbers that all processes draw alike, as for the order of batches; none before the cell"""
APART = []
"""whether processes draw other numbers than each other"""


class RankBatches:
    """Of each round of batches the one of this process; of an uneven last one, and of each batch where SPLIT is set,
    every so manieth sample."""

    def __init__(self, loader, share, shares):
        self.batches, self.generator = loader.batch_sampler, loader.generator
        self.share, self.shares = share, shares
        self.once, self.begun = loader.persistent_workers, False
        self.drop_last = getattr(loader.batch_sampler, "drop_last", False)

    def __len__(self):
        count = 1 if SPLIT else self.shares
        return len(self.batches) // count if self.drop_last else -(-len(self.batches) // count)

    def __iter__(self):
        own = random_states()
        set_random_states(SHARED[0])
        if not (self.once and self.begun):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # as a loader does, first
        self.begun = True
        batches = [list(batch) for batch in self.batches]
        SHARED[0] = random_states()
        set_random_states(own)
        each = 1 if SPLIT else self.shares
        for at in range(0, len(batches), each):
            found = batches[at : at + each]
            if len(found) == self.shares and len(set(map(len, found))) == 1:
                yield found[self.share]
            elif SPLIT or len(found) == self.shares or not self.drop_last:
                samples = [sample for batch in found for sample in batch]
                filling = samples if SPLIT else [sample for batch in batches for sample in batch]
                samples += (filling * self.shares)[: -len(samples) % self.shares]
                yield samples[self.share :: self.shares]


class LeftAlone:
    """A loader that is not dealt out: its own sampler does, as DistributedSampler, or it has no batches."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        if self.loader.generator is None:
            own = random_states()
            set_random_states(SHARED[0])
            torch.empty((), dtype=torch.int64).random_()  # as it does itself, from this process's own numbers
            SHARED[0] = random_states()
            set_random_states(own)
        return iter(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


class OnDevice:
    """A loader whose batches are on this process's device."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        apart()
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


PARTS = weakref.WeakKeyDictionary()


def part_of(loader, share, shares):
    """A loader of this share of its batches."""
    if WORLD_SIZE == 1:
        return loader
    stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if stream and shares > 1:
        raise TypeError("a stream cannot be dealt out: have a data set with indices")
    if stream or loader.batch_sampler is None or deals_itself(loader):
        return LeftAlone(loader)
    parts = PARTS.setdefault(loader, {})
    if shares not in parts:
        parts[shares] = torch.utils.data.DataLoader(
            loader.dataset, batch_sampler=RankBatches(loader, share, shares),
            num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
    return parts[shares]


def deals_itself(loader):
    """Whether its own sampler deals batches out, as torch's DistributedSampler, or one written like it."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    counts = [getattr(one, name, 1) for one in samplers for name in ("num_replicas", "num_processes")]
    return any(isinstance(count, int) and count > 1 for count in counts)


def dealt(loader):
    """A loader of this process's share of the batches."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    if not SHARED:  # before the cell: as the notebook's own statements do, alike on all processes
        return OnDevice(loader)
    return {counted}(part_of(loader, SHARE, SHARES))


def whole(loader):
    """A loader that every process sees whole, as where a loop evaluates."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    return OnDevice(part_of(loader, 0, 1) if SHARED else loader)


def dealt_if_training(loader):
    """Whole where gradients are off, or all models in eval mode; else dealt."""
    if not SHARED or not isinstance(loader, torch.utils.data.DataLoader):
        return dealt(loader)
    trains = torch.is_grad_enabled() and any(globals()[name].training for name in MODELS)
    return dealt(loader) if trains or not MODELS else whole(loader)


def same_weights(model):
    """All processes begin with those of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()) if WORLD_SIZE > 1 else ():
        dist.broadcast(tensor.detach(), 0)


def same_random_numbers():
    """The cell begins with rank 0's on all processes."""
    SHARED[:] = [random_states()]
    if WORLD_SIZE > 1:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        dist.broadcast_object_list(SHARED)
        set_random_states(SHARED[0])
        register_optimizer_step_pre_hook(lambda *_: apart())


def apart():
    """From the first batch or step on each process draws for itself, as for dropout and augmentation; what all draw
    alike goes on from here."""
    if WORLD_SIZE == 1 or APART or not SHARED:
        return
    APART.append(True)
    SHARED[0] = random_states()
    if RANK:
        import random

        torch.manual_seed(torch.initial_seed() + RANK)
        random.seed(random.getrandbits(32) + RANK)
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            numpy.random.seed(int(numpy.random.randint(2**31)) + RANK)
'''
