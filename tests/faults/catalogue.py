"""Everything that may go wrong in a cell, as data: what is written, what the notebook then says, who lives on.

    Fault("what it is", body, raises="ValueError", says=("raised on {victim}",), ...)

`test_faults` plays each under every strategy and start method that it makes sense for. Bodies are cells for the world
of world.py; their victim is the last rank. Lines that end with `# harm` are what the unharmed cell does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.faults.scene import COMBINATIONS, Combination
from tests.faults.world import STEP

HERE = "rank == world_size - 1"
"""True on the victim."""
EVERY = tuple(dict.fromkeys(one.strategy for one in COMBINATIONS))
MANY = tuple(name for name in EVERY if any(one.ranks > 1 for one in COMBINATIONS if one.strategy == name))
PIECES = tuple(name for name in EVERY if any(one.in_pieces for one in COMBINATIONS if one.strategy == name))
STAGES = tuple(name for name in EVERY if name == "pipeline")
"""No rank runs a model from its beginning to its end."""
WHOLE = tuple(name for name in MANY if name not in (*PIECES, "none"))
"""Each rank has all of a model, and they agree."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them."""

    name: str
    body: str
    raises: str = ""
    """the class of the notebook's error; nothing: the cell ends well"""
    says: tuple[str, ...] = ()
    """is in the error, on several ranks"""
    shows: tuple[str, ...] = ()
    """is in what the cell shows, error included, whatever the number of ranks"""
    dies: str = ""
    """ranks that have another process afterwards: the "last" one, "all", "some" (it is not said which), or nobody"""
    held: bool | None = None
    """whether `recover` is offered on several ranks; None: either is right"""
    press: tuple[str | float, ...] = ()
    """Stop is pressed when the cell has shown this, or after so many seconds; and once more for each further one"""
    no_ranks: bool = False
    """they are started by the cell"""
    extra: str = ""
    """more of the world"""
    options: str = ""
    strategies: tuple[str, ...] = EVERY
    then: tuple[str, str] = ("", "")
    """a cell on the ranks afterwards, and what it shows"""
    here: tuple[str, str] = ("", "")
    """a cell of the notebook right after the error, and what it shows"""
    leaves: dict[str, int] = field(default_factory=dict)
    """what of the user's own may live on until the ranks end (census.py): so much more of it; all ends with them"""
    seconds: float = 25

    def fits(self, combination: Combination) -> bool:
        return combination.strategy in self.strategies


def at(step: int, harm: str, who: str = HERE, steps: int = 12, after: str = "") -> str:
    """Training, with one line of harm before a step."""
    line = f"    if i == {step} and {who}: {harm}  # harm"
    return f"for i, (x, y) in enumerate(itertools.islice(loader, {steps})):\n{line}{STEP}{after}"


TRAIN = at(99, "pass")
"""Unharmed."""

RAISED = [
    Fault("exception on the last rank", at(5, "raise ValueError('boom')"), "ValueError",
          says=("raised on rank 1", "boom"), held=True),
    Fault("exception on the first rank", at(5, "raise ValueError('boom')", "rank == 0"), "ValueError",
          says=("raised on rank 0",), held=True),
    Fault("exception on all ranks", at(5, "raise ValueError('boom')", "True"), "ValueError",
          says=("raised on all 2 ranks",), held=True),
    Fault("exceptions of two kinds", at(5, "raise (ValueError if rank else KeyError)('boom')", "True"),
          says=(" raised ",), raises="ValueError|KeyError", strategies=("none",), held=True),
    Fault("exception before the first step", at(0, "raise ValueError('boom')"), "ValueError", held=None),
    Fault("exception after the last step", TRAIN + f"if {HERE}: raise ValueError('late')  # harm\n", "ValueError",
          held=True),
    Fault("a wrong shape in forward while the peer is in backward", at(5, "model(x[:, :3])"), "RuntimeError",
          shows=("mat1 and mat2",), held=True, strategies=tuple(name for name in EVERY if name not in STAGES)),
    Fault("a wrong shape in forward on all ranks", at(5, "model(x[:, :3])", "True"), "RuntimeError",
          shows=("mat1 and mat2",), held=True),
    Fault("a stage that raises", at(5, "fail.append(1)"), "ArithmeticError",
          shows=("in a stage",), strategies=STAGES, held=True, extra="""
fail = []
class Breaks(nn.Tanh):
    def forward(self, x):
        if fail: raise ArithmeticError("in a stage")
        return super().forward(x)
model[1] = Breaks()
"""),
    Fault("a batch that only one rank has", at(5, "x = x + 1"), "NotSupported", shows=("different batches",),
          strategies=STAGES, held=True),
    Fault("exception in backward", at(5, "z = model(x); z.register_hook(lambda g: 1 / 0); z.sum().backward()"),
          "ZeroDivisionError", held=True),
    Fault("an optimizer that raises half way", """
for i, (x, y) in enumerate(itertools.islice(loader, 12)):
    Half.breaks = i == 5 and rank == world_size - 1  # harm
    F.cross_entropy(model(x), y).backward(); half.step(); half.zero_grad(); mark()
""", "ArithmeticError", extra="""
class Half(torch.optim.SGD):
    breaks = False
    def step(self, closure=None):
        with torch.no_grad():
            held = [p for group in self.param_groups for p in group["params"]]
            for number, p in enumerate(held):
                if number == len(held) // 2 and self.breaks: raise ArithmeticError("half way")
                if p.grad is not None: p -= 0.1 * p.grad
opt = half = Half(model.parameters(), 0.1)
sched = torch.optim.lr_scheduler.StepLR(half, 10, 0.9)
world.update(opt=half, sched=sched)
"""),
    Fault("a closure of LBFGS that raises", """
for i, (x, y) in enumerate(itertools.islice(loader, 6)):
    calls = 0
    def closure():
        global calls
        calls += 1
        if i == 3 and calls == 3 and rank == world_size - 1: raise ArithmeticError("in a closure")  # harm
        slow.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward()
        return loss
    slow.step(closure); slow.zero_grad(); mark()
""", "ArithmeticError", extra="slow = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=5); world['slow'] = slow",
          strategies=("single", "none")),
    Fault("exception while peers wait in a subgroup", f"""
group = dist.new_group()  # harm
{at(5, "raise KeyError('x')")}
dist.all_reduce(torch.ones(1), group=group)  # harm
""", "KeyError", strategies=MANY, held=True),
    Fault("an exception that cannot be pickled", at(5, "raise Locked()"), "Locked|RankError", shows=("a lock in it",),
          extra="""
class Locked(Exception):
    def __init__(self): super().__init__("a lock in it"); self.lock = threading.Lock()
"""),
    Fault("an exception whose text raises", at(5, "raise Mute()"), "RankError", shows=("Mute",), extra="""
class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")
"""),
    Fault("an exception defined in the cell", "class Own(ValueError): pass  # harm\n" + at(5, "raise Own('mine')"),
      "Own",
          shows=("mine",)),
    Fault("a chain of exceptions", at(5, "cause()"), "OSError", shows=("ZeroDivisionError", "1 / 0", "direct cause"),
          here=("%tb", "1 / 0"), extra="""
def cause():
    try: 1 / 0
    except ZeroDivisionError as error: raise OSError("consequence") from error
"""),
    Fault("no memory for python", at(5, "bytearray(1 << 60)"), "MemoryError"),
    Fault("no memory for torch", at(5, "torch.empty(1 << 55)"), "RuntimeError"),
    Fault("endless recursion", at(5, "again()"), "RecursionError", extra="""
def again():  # IPython shows all of a thousand frames, and takes a minute for it
    def deep(): return deep()
    try: return deep()
    except RecursionError as error: raise error.with_traceback(None) from None
"""),
    Fault("KeyboardInterrupt raised by the cell", at(5, "raise KeyboardInterrupt('my own')"), "KeyboardInterrupt"),
    Fault("sys.exit", at(5, "sys.exit()"), "SystemExit"),
    Fault("sys.exit with a code", at(5, "sys.exit(3)"), "SystemExit"),
    Fault("exception in collate", """
loader.collate_fn = collate  # harm
""" + TRAIN, "ValueError", shows=("in collate",), extra="""
def collate(samples): raise ValueError("in collate")
"""),
]  # fmt: skip

DIED = [
    Fault("SIGKILL", at(5, "print('last words'); os.kill(os.getpid(), signal.SIGKILL)"), "RankDied",
          shows=("SIGKILL",), says=("rank 1",), dies="last"),
    Fault("SIGKILL of all", at(5, "os.kill(os.getpid(), signal.SIGKILL)", "True"), "RankDied", shows=("SIGKILL",),
          dies="all"),
    Fault("SIGSEGV", at(5, "ctypes.string_at(0)"), "RankDied", shows=("SIGSEGV",), dies="last"),
    Fault("SIGABRT", at(5, "os.abort()"), "RankDied", shows=("SIGABRT",), dies="last"),
    Fault("os._exit", at(5, "os._exit(3)"), "RankDied", shows=("3",), dies="last"),
    Fault("os._exit without a failure", at(5, "os._exit(0)"), "RankDied", dies="last"),
    Fault("the first rank dies", at(5, "os.kill(os.getpid(), signal.SIGKILL)", "rank == 0"), "RankDied",
          shows=("SIGKILL",), says=("rank 0",), dies="first", strategies=WHOLE, held=True),
    Fault("a rank dies with its pieces", at(5, "os.kill(os.getpid(), signal.SIGKILL)", "rank == 0"), "RankDied",
          shows=("SIGKILL",), says=("rank 0", "not all are left", "--save-every"), dies="first", strategies=PIECES,
          held=False),
    Fault("SIGSTOP, and on after a second", at(5, "freeze()"), extra="""
def freeze():
    child = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    child.wait()
"""),
]  # fmt: skip

WORKERS = """
class Broken(Dataset):
    how = ""
    def __len__(self): return 160
    def __getitem__(self, i):
        if i == 101:
            if self.how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit": os._exit(1)
            if self.how == "raise": raise ValueError("sample 101")
        return X[i], Y[i]
broken = Broken()
loader = world["loader"] = DataLoader(broken, batch_size=4, num_workers=2)
"""


def workers(how: str) -> str:
    return f"broken.how = '{how}'  # harm\nfor x, y in loader:{STEP}"


KEPT = {"a rank's files": 8, "files: nbtrain-*/listener-*": 16}
"""The last batches are memory that workers have shared, and a worker that is killed leaves its socket."""
LOST = "RuntimeError|ConnectionResetError|HorovodInternalError"
"""Torch tells it by a signal, which may come while it waits for what the worker was to hand over, or while Horovod
waits for the other rank: that takes every RuntimeError for its own, and passes its words on."""


LOADERS = [
    Fault("a loader's worker is killed", workers("kill"), LOST, extra=WORKERS, leaves=KEPT),
    Fault("a loader's worker exits", workers("exit"), LOST, extra=WORKERS, leaves=KEPT),
    Fault("a loader's worker raises", workers("raise"), "ValueError", shows=("sample 101",), extra=WORKERS,
          leaves=KEPT),
]  # fmt: skip

FLOOD = """
def flood(megabytes):
    line = b"." * 99 + b"\\n"
    for _ in range(megabytes * 50): os.write(1, line * 100)
    for _ in range(megabytes * 50): print("." * 99 + "\\n", end="")
    for _ in range(megabytes * 50): os.write(2, line * 100)
    for _ in range(megabytes * 50): sys.stderr.write("," * 99 + "\\n")
"""

MISUSE = [
    Fault("a flood of output", "flood(10)  # harm\n" + TRAIN, extra=FLOOD, seconds=100),
    Fault("a flood of output, then an exception", at(5, "flood(10); raise ValueError('boom')"), "ValueError",
          shows=("boom",), extra=FLOOD, seconds=100),
    Fault("threads that are never joined", """
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # harm
threading.Thread(target=time.sleep, args=(600,), daemon=False).start()  # harm
""" + TRAIN, leaves={"a rank's threads": 2}),
    Fault("sys.stdout replaced", "import io  # harm\nsys.stdout = sys.stderr = io.StringIO()  # harm\n" + TRAIN,
          then=("print('seen')\nprint('seen too', file=sys.stderr)", "seen too")),
    Fault("sys.stdout closed", "sys.stdout.close()  # harm\n" + TRAIN, then=("print('seen')", "seen")),
    Fault("a fork that ends with the cell", TRAIN + "pid = os.fork()  # harm\nif pid: os.waitpid(pid, 0)  # harm\n"),
    Fault("a fork that raises", TRAIN + "pid = os.fork()  # harm\nif not pid: raise ValueError('child')  # harm\n"
          "os.waitpid(pid, 0)  # harm\n"),
    Fault("processes left running", "start()  # harm\n" + TRAIN, leaves={
        "processes: other": 2, "processes: a rank's child": 4, "a rank's pipes": 4, "a rank's devices": 2}, extra="""
def start():
    subprocess.Popen(["sleep", "600"])
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
"""),
    Fault("the process group destroyed", TRAIN + "dist.destroy_process_group()  # harm\n", strategies=MANY,
          then=("print(float(reduce(torch.tensor(float(rank)), 'max')))", "1.0")),
    Fault("the process group formed again", TRAIN + "dist.init_process_group('gloo')  # harm\n", "NotSupported",
          shows=("-s none",), strategies=tuple(name for name in MANY if name != "none"), held=True),
    Fault("a group left behind", "group = dist.new_group()  # harm\ndist.barrier(group)  # harm\n" + TRAIN,
          strategies=MANY, leaves={f"a rank's {what}": 9 for what in ("threads", "sockets", "pipes", "anon_inode")}),
    Fault("handlers of SIGTERM and SIGCHLD", "for number in (signal.SIGTERM, signal.SIGCHLD):  # harm\n"
          "    signal.signal(number, lambda *_: 1 / 0)  # harm\n" + TRAIN,
          strategies=tuple(name for name in EVERY if name != "deepspeed")),
    # While ZeRO's third stage trains a process of its own ends, and the handler of SIGCHLD raises in a backward.
    Fault("a handler of SIGTERM", "signal.signal(signal.SIGTERM, lambda *_: 1 / 0)  # harm\n" + TRAIN,
          strategies=tuple(name for name in EVERY if name == "deepspeed")),
    Fault("every handler a cell can have, and then a death", "for number in range(1, 32):  # harm\n"
          "    if number not in (9, 19): signal.signal(number, lambda *_: None)  # harm\n"
          + at(5, "os.kill(os.getpid(), signal.SIGKILL)"), "RankDied", dies="some"),
]  # fmt: skip

SLOW = "pause = 0.02\n" + at(5, "print('begun')", "True", steps=150)
"""Goes on for three seconds."""


def forever(line: str) -> str:
    return f"print('begun')\n{line}\n"


STOPPED = [
    Fault("Stop in a loop", SLOW, "KeyboardInterrupt", shows=("stopped after step",), press=("begun",)),
    Fault("Stop where SIGINT is ignored", "signal.signal(signal.SIGINT, signal.SIG_IGN)  # harm\n" + SLOW,
          "KeyboardInterrupt", shows=("stopped after step",), press=("begun",)),
    Fault("Stop where SIGINT has another handler", "signal.signal(signal.SIGINT, lambda *_: None)  # harm\n" + SLOW,
          "KeyboardInterrupt", shows=("stopped after step",), press=("begun",)),
    Fault("Stop in a sleep", forever("time.sleep(600)"), "KeyboardInterrupt", press=("begun",)),
    Fault("Stop in a loop of python", forever("while True: pass"), "KeyboardInterrupt", press=("begun",)),
    Fault("Stop in a long call of C", forever("torch.linalg.svd(torch.randn(1300, 1300))\ntime.sleep(600)"),
          "KeyboardInterrupt", press=("begun",)),
    Fault("Stop in a barrier that the peer never joins", forever(f"barrier() if not ({HERE}) else time.sleep(600)"),
          "KeyboardInterrupt", press=("begun",), strategies=MANY),
    Fault("Stop of a cell that swallows it", forever(
          "while True:\n    try: time.sleep(0.05)\n    except BaseException: pass"), "KeyboardInterrupt",
          shows=("as it was before",), press=("begun", "Press Stop again"), dies="all"),
    Fault("Stop after steps that ends in a swallowed loop", "pause = 0.0\n" + TRAIN
          + "while True:  # harm\n    try: print('begun'); time.sleep(9)  # harm\n"
          "    except BaseException: pass  # harm\n",
          "KeyboardInterrupt", shows=("as it was before",), press=("begun", "Press Stop again"), dies="all"),
    Fault("mismatched collectives", TRAIN
          + "(dist.broadcast if rank else dist.all_reduce)(torch.ones(3), *[0] * rank)  # harm\n",
          "NotSupported", shows=("gone different ways",), strategies=MANY, held=True),
    Fault("a collective that one rank skips", TRAIN + "if rank == 0: dist.all_reduce(torch.ones(1))  # harm\n",
          "NotSupported", shows=("come to the end of the cell",), strategies=MANY, held=True),
    Fault("a hang", TRAIN + f"time.sleep(600) if {HERE} else dist.all_reduce(torch.ones(1))  # harm\n",
          "KeyboardInterrupt", shows=("(--hang-after 1)", "rank 0 waits in all_reduce", "stopped after step 12"),
          press=("(--hang-after 1)",), options="--hang-after 1", strategies=MANY),
    Fault("Stop while the ranks start", forever("time.sleep(600)"), "KeyboardInterrupt", press=(0.1,), dies="some",
          no_ranks=True),
    Fault("Stop while the ranks import", forever("time.sleep(600)"), "KeyboardInterrupt", press=(1.0,), dies="some",
          no_ranks=True),
    Fault("Stop while it is sent", "len(much)\n" + forever("time.sleep(600)"), "KeyboardInterrupt", press=(0.2,),
          dies="some", extra="much = [[float(i)] for i in range(300_000)]"),
]  # fmt: skip

HALF_WAY = next(fault for fault in RAISED if "half way" in fault.name)
LEAVES_STEPS_TOGETHER = ("zero1", "sharded")
"""A rank whose peer raises in a step is not through with it."""
APART = [
    replace(HALF_WAY, name="pieces of two steps", held=False, says=("stand at different steps",),
            strategies=tuple(name for name in PIECES if name not in LEAVES_STEPS_TOGETHER)),
]  # fmt: skip

FAULTS = [*RAISED, *DIED, *LOADERS, *MISUSE, *STOPPED, *APART]
