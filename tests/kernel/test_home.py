"""What a cell made, changed or left behind, as the notebook finds it afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

pytestmark = pytest.mark.kernel

TWO = "%%distributed --devices 2"
ONE = "%%distributed --devices 1"


@pytest.fixture
def book(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    yield made
    made("%distributed stop")


# -- handles -------------------------------------------------------------------------------


def test_kept_names_stay_on_the_ranks_and_copies_can_be_pulled(book: Notebook) -> None:
    said = book(f"{TWO} --keep cache\ncache = {{'rank': rank, 'at': torch.full((3,), rank)}}\nother = 1").stdout
    assert "cache stays on the ranks" in said
    book("assert other == 1 and 'dict on the ranks' in repr(cache), cache")
    book("assert cache.pull()['rank'] == 0; assert cache.pull() is not cache.pull()")
    book("""
found = {r: (v['rank'], v['at'].tolist()) for r, v in cache.per_rank().items()}
assert found == {0: (0, [0] * 3), 1: (1, [1] * 3)}""")


def test_in_the_next_cell_the_handle_is_the_object_itself(book: Notebook) -> None:
    book(f"{TWO} --keep cache\ncache = [rank]\nalias = cache")
    book(f"{TWO}\ncache.append(10 + rank)\nsame = alias is cache")
    book("assert same and alias is cache and cache.pull() == [0, 10] and cache.per_rank()[1] == [1, 11]")


def test_what_otherwise_travels_by_value_is_kept_on_every_rank(book: Notebook) -> None:
    made = "pair = (rank, [rank]); text = f'{rank}' * 20_000; few = frozenset([rank]); many = tuple(range(rank, 400))"
    book(f"{TWO} --keep pair,text,few,many\n{made}")
    book("assert pair.per_rank() == {0: (0, [0]), 1: (1, [1])} and few.per_rank()[1] == {1}")
    book(f"{TWO}\npair[1].append(2)\nseen = gather((pair, text[0], set(few), many[0]))")
    book("assert seen == [((r, [r, 2]), str(r), {r}, r) for r in (0, 1)], seen")


def test_numbers_come_home_all_the_same_and_say_where_they_differ(book: Notebook) -> None:
    said = book(f"{TWO} --keep n,box\nn = 7 + rank; box = [rank]").stdout
    assert "values differ across ranks: n; kept rank 0's" in said, said
    book(f"{TWO}\nseen = gather((n, box))")
    book("assert n == 7 and seen == [(7, [0]), (7, [1])], seen")


def test_what_was_pulled_is_an_ordinary_object_of_the_notebooks(book: Notebook) -> None:
    book(f"{TWO} --keep cache\ncache = [1]")
    book("cache = cache.pull(); cache.append(2)")
    book(f"{TWO}\nseen = gather(sum(cache))\ncache.append(3)")
    book("assert seen == [3, 3] and cache == [1, 2, 3]")


def test_a_kept_model_stays_as_it_is_until_a_cell_brings_it_home(book: Notebook) -> None:
    book(TRAIN)
    book("before = [p.clone() for p in model.parameters()]")
    book(f"{TWO} --keep model,opt{LOOP}")
    book("assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and not opt.state")
    book(f"{TWO}\nn = len(list(model.parameters()))")
    book("assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))")
    book(f"{TWO}\nn = len(opt.state)")
    book("assert n == len(opt.state) == 4")


def test_a_name_to_keep_that_nobody_has_is_a_mistake(book: Notebook) -> None:
    said = book.refused(f"{TWO} --keep chache\ncache = [1]")
    assert "no 'chache'" in said
    assert "did you mean cache?" in said
    assert "names" in book.refused(f"{TWO} --keep 1+1\ncache = [1]")


def test_new_values_beyond_the_limit_stay_behind_a_handle(book: Notebook) -> None:
    said = book(
        f"{TWO}\nhuge = torch.zeros(280_000_000) if rank == 0 else torch.ones(2)\nsmall = huge[:3].clone()"
    ).stdout
    assert "huge stays on the ranks" in said, said
    assert "huge.pull()" in said, said
    book("assert small.tolist() == [0, 0, 0] and 'Tensor on the ranks' in repr(huge)")
    book(f"{TWO}\ndel huge")
    book("assert 'huge' not in globals()")


def test_what_cannot_travel_stays_behind_and_says_why(book: Notebook) -> None:
    book(f"{TWO}\nimport threading\nlock = threading.Lock()\nbox = {{'lock': lock, 'n': 1}}")
    book("assert box['n'] == 1 and box['lock'] is lock and 'lock on the ranks' in repr(lock)")
    assert "cannot leave the ranks" in book.fails("lock.pull()").evalue
    assert "%%distributed" in book.fails("lock.acquire()").evalue


def test_what_cannot_be_made_in_the_notebook_does_not_cost_the_rest(book: Notebook) -> None:
    book(TRAIN)
    book("before = [p.clone() for p in model.parameters()]")
    said = book(f"""{TWO}
class Odd:
    def __init__(self): self.n = 1
    def __setstate__(self, state): raise ValueError('not here')
odd = Odd(); odds = [odd, Odd()]
{LOOP}""").stdout
    assert "ValueError: not here" in said
    book("assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))")
    book("assert odds[0] is odd and 'Odd on the ranks' in repr(odd)")
    book(f"{TWO}\nstill = odds[0] is odd and odd.n + odds[1].n")
    book("assert still == 2")


def test_no_option_ends_ranks_that_hold_something_kept(book: Notebook) -> None:
    book(f"{TWO} --keep cache\ncache = [rank]")
    said = book.refused(f"{ONE}\npass")
    assert "cache.pull()" in said
    assert "%distributed stop" in said
    book("assert cache.pull() == [0]; cache = None")
    book(f"{ONE}\npass")


def test_keep_needs_ranks_that_live_on(book: Notebook) -> None:
    assert "--start fork" in book.refused("%%distributed --start fork --devices 2 --keep a\na = [1]")
    assert "inprocess" in book.refused("%%distributed --engine inprocess --keep a\na = [1]")


def test_a_handle_is_one_thing_wherever_it_is_held(book: Notebook) -> None:
    book("import copy, pickle")
    book(f"{TWO} --keep cache\ncache = [rank]")
    book("other = copy.copy(cache); inside = [copy.deepcopy(cache)]; assert other is cache is inside[0]")
    assert "pull" in book.fails("pickle.dumps(cache)").evalue
    assert "set .size in a %%distributed cell" in book.fails("cache.size = 5").evalue
    book("del cache, other")
    said = book(f"{TWO}\ninside[0].append(5)").stdout  # nothing that stays may differ
    assert "differ" not in said, said
    book("assert inside[0].per_rank() == {0: [0, 5], 1: [1, 5]}")
    book(f"{TWO} --keep more\nmore = [1]")
    book("aside = [more]; Out['aside'] = aside; del more, aside")  # what only the history holds ends with its ranks
    assert "UsageError: inside[0]: what" in book.refused(f"{ONE}\npass")
    book("assert Out.pop('aside')[0].pull() == [1]")
    book.fails(f"{TWO}\n1/0")
    book("assert inside[0].per_rank() == {0: [0, 5], 1: [1, 5]}")
    book(f"{TWO}\ninside[0].append(6)")
    book("assert inside[0].pull() == [0, 5, 6]; inside = None")
    book(f"{ONE}\npass")


def test_what_one_rank_made_is_pulled_from_it_after_a_failure_too(book: Notebook) -> None:
    book("%distributed start --devices 2")
    book("%%rank 1 --keep mine\nmine = [rank]")
    book.fails(f"{TWO}\n1/0")
    book("assert mine.pull() == [1]")


def test_threads_do_not_take_each_others_answers(book: Notebook) -> None:
    book(f"{TWO} --keep cache\ncache = [rank]")
    book("""
import threading
def ask():
    try: cache.pull()
    except Exception as error: said = str(error); answers.append(said)
answers = []
thread = threading.Thread(target=ask); thread.start(); thread.join()
assert 'thread' in answers[0], answers""")


KEPT = f"{ONE} --keep opt,pair\nopt = torch.optim.SGD(model.parameters(), 0.1); pair = [model, Word('a')]"
WORD = """
class Word:
    def __init__(self, text): self.text = text
model = net(); weight = model[0].weight"""


def test_what_changes_through_a_kept_object_comes_home_and_goes_out(book: Notebook) -> None:
    book(WORD)
    book(KEPT)
    book(f"{ONE}\nfor p in opt.param_groups[0]['params']: p.data.fill_(5.)")
    book("assert (weight == 5).all() and pair.pull()[0] is model; weight.data.fill_(7.)")
    book(f"{ONE}\nseen = opt.param_groups[0]['params'][0].mean().item()")
    book("assert seen == 7")
    book("more = [1]")
    book(f"{ONE}\npair.append(more)")
    book("more.append(2)")
    book(f"{ONE}\nseen = list(pair[2]); pair[2].append(3)")
    book("assert seen == [1, 2] and more == [1, 2, 3]")


def test_a_kept_optimizer_steps_the_notebooks_model_after_a_failure(book: Notebook) -> None:
    book(WORD)
    book(KEPT)
    book.fails(
        f"{ONE}\nwith torch.no_grad(): weight.fill_(3.)\nWord.text = 'no'; model.extra = 1; pair[1].text = 'b'; 1/0"
    )
    book("before = weight.detach().clone()")
    book(f"""{ONE}
assert torch.equal(before, weight) and not hasattr(model, 'extra') and not hasattr(Word, 'text')
assert opt.param_groups[0]['params'][0] is weight is pair[0][0].weight and isinstance(pair[1], Word)
F.cross_entropy(model(X), Y).backward(); opt.step(); opt.zero_grad()""")
    book("assert not torch.equal(before, weight) and pair.pull()[0] is model and type(pair.pull()[1]) is Word")


def test_what_could_not_be_told_of_a_change_is_said_as_it_is(book: Notebook) -> None:
    book("""
class Moody:
    n = 0
    def __getstate__(self):
        import builtins
        if hasattr(builtins, 'rank'): raise RuntimeError('not there')
        return self.__dict__
moody = Moody(); moody.n = 1""")
    said = book(f"{TWO}\nmoody.n = 2\nnew = Moody()").stdout
    assert "moody: what changed in it stays on the ranks, the notebook's is as it was" in said
    assert "new stays on the ranks, the notebook has a handle for it" in said
    assert said.count("RuntimeError: not there") >= 1
    book("assert moody.n == 1")


def test_after_a_failure_kept_objects_hold_what_the_notebook_has(book: Notebook) -> None:
    book("import numpy as np; array = np.zeros(6); part = array[2:4]; tensor = torch.from_numpy(array)")
    book("notes = {'a': [1]}")
    book(f"{TWO} --keep box\nbox = [array, part, tensor, notes, notes['a']]")
    book.fails(f"{TWO}\narray[2] = 5; tensor += 1; notes['a'].append(2); notes['b'] = 1; box.append(1); 1/0")
    book(f"""{TWO}
mine = [array, part, tensor, notes, notes['a']]
same = gather([a is b for a, b in zip(box, mine)])
found = array.tolist(), part.tolist(), tensor.tolist(), notes""")
    book("assert same == [[True] * 5] * 2 and found == ([0] * 6, [0] * 2, [0] * 6, {'a': [1]}), (same, found)")


# -- what differs between ranks ---------------------------------------------------------------


@pytest.mark.parametrize(("key", "own"), [("lr", "0.1 + {}"), ("betas", "(0.9 - 0.1 * {}, 0.99)")])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "pipeline"])
def test_a_number_of_each_ranks_own_in_a_group_is_the_reason_that_is_named(
    book: Notebook, strategy: str, key: str, own: str
) -> None:
    book(
        "w = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)); opt = torch.optim.Adam(w.parameters())"
    )
    loop = "for x in torch.utils.data.DataLoader(torch.ones(8, 2), 2):\n    w(x).sum().backward()\n"
    step = f"    opt.param_groups[0]['{key}'] = {{}}\n    opt.step(); opt.zero_grad()\n"
    line = f"%%distributed -s {strategy} --devices 2"
    said = book(f"{line}\n{loop}{step.format(own.format('rank'))}").stdout
    (about,) = (one for one in said.splitlines() if "rank 1" in one and "stage" not in one)
    assert about.startswith(f"opt.param_groups[0]['{key}']: not the same on rank 1 as on rank 0"), said
    said = book(f"{line}\n{loop}{step.format(own.format('reduce(rank)'))}").stdout
    assert "not the same" not in said


def test_what_differs_is_named_and_the_notebooks_goes_to_all(book: Notebook) -> None:
    book("log_ = []; same = []")
    said = book(
        f"{TWO}\nlog_.append(rank); same.append(1)\nx = torch.tensor(rank); y = {{'a': [1, {{rank}}]}}; z = 7"
    ).stdout
    line = next(line for line in said.splitlines() if line.startswith("values differ across ranks"))
    assert line == "values differ across ranks: log_, x, y; kept rank 0's"
    said = book(f"{TWO}\nseen = gather((list(log_), same, x.item()))").stdout
    assert "differ" not in said
    book("assert seen == [([0], [1], 0)] * 2, seen")


@pytest.mark.thorough
def test_sets_of_text_have_one_order_on_spawned_ranks(book: Notebook) -> None:
    said = book(f"{TWO} --start spawn\norder = list({{str(i) for i in range(50)}})").stdout
    assert "differ" not in said, said


# -- in place ------------------------------------------------------------------------------


def test_large_things_are_compared_as_a_whole(book: Notebook) -> None:
    book("big = torch.zeros(1_000_000); rows = [0.0] * 5000; words = {f'w{i}': str(i) for i in range(500)}")
    same = book(f"{TWO}\nbig.add_(1); rows[7] = 1.0; words['w3'] = 'x'; new = torch.ones(900_000)").stdout
    assert "differ" not in same
    said = book(
        f"{TWO}\nbig[5] = rank; rows[2500] = rank; words['w9'] = str(rank); new = torch.ones(900_000) * rank"
    ).stdout
    assert "values differ across ranks: big, rows, words, new;" in said
    said = book(f"{TWO}\nseen = gather((big[5].item(), rows[2500], words['w9'], new[3].item()))").stdout
    assert "differ" not in said
    book("assert seen == [(0, 0, '0', 0)] * 2, seen")


def test_hooks_on_gradients_travel_and_are_noticed(book: Notebook) -> None:
    """A mask that is lost would train what was to be frozen."""
    book("""
mask = torch.tensor([[1.0, 0, 1, 0]]); weight = torch.nn.Parameter(torch.ones(1, 4)); calls = []
def masked(grad):
    calls.append(1)
    return grad * mask
handle = weight.register_hook(masked)
model = nn.Linear(4, 1, bias=False)""")
    cell = "%%distributed --devices 2\nweight.sum().backward(); found = weight.grad.tolist(); weight.grad = None"
    book(cell)
    book("assert found == [[1, 0, 1, 0]] and calls == [1], (found, calls)")
    book("mask[0, 0] = 5")
    book(cell)
    book("assert found == [[5, 0, 1, 0]], found\nhandle.remove()")
    book(cell)
    book("assert found == [[1, 1, 1, 1]], found")
    book("model.weight.register_hook(lambda grad: grad * mask)")
    book("%%distributed --devices 2\nmodel(torch.ones(1, 4)).sum().backward(); found = model.weight.grad.tolist()")
    book("assert found == [[5, 0, 1, 0]], found")
    book("%%distributed --devices 2\nmodel.weight.register_hook(lambda grad: grad + 1)")
    book("model.weight.grad = None; model(torch.ones(1, 4)).sum().backward()")
    book("assert model.weight.grad.tolist() == [[6, 1, 2, 1]], model.weight.grad")
    book("other = nn.Linear(2, 2); _ = other.weight.register_post_accumulate_grad_hook(lambda p: None)")
    assert "before it is averaged" in book.fails("%%distributed --devices 2\nother(torch.ones(1, 2)).sum()").evalue
    book("%%distributed --devices 1\nother(torch.ones(1, 2)).sum().backward()")


def test_what_the_others_have_outlives_a_rank(book: Notebook) -> None:
    book(f"{TWO} --keep cache\ncache = torch.ones(3) * (rank + 1)")
    lost = book.kernel.run(f"{TWO}\nimport os\nif rank == 0: os._exit(3)\nbarrier()")
    assert lost.error is not None
    assert lost.error.ename == "RankDied"
    assert "cache: rank 0's is gone; bring home what the others have with cache = cache.pull()" in lost.stdout
    refused = book.fails(f"{TWO}\nprint(cache)")
    assert "rank 0 had to be started anew" in refused.traceback
    assert ".pull()" in refused.traceback
    book("assert cache.pull().tolist() == [2, 2, 2] and list(cache.per_rank()) == [1]")
    book("cache = cache.pull()")
    book(f"{TWO}\nassert cache.sum() == 6")
    book(f"{TWO} --keep cache\ncache = 1.5 * torch.ones(3)")
    lost = book.kernel.run(f"{TWO}\nimport os\nos._exit(3)")
    assert "cache: lived on these ranks only" in lost.stdout
    assert "make it again" in book.fails("cache.pull()").evalue


def test_what_was_kept_and_is_dropped_is_said(book: Notebook) -> None:
    book(TRAIN)
    book(f"{TWO} --keep model,opt{LOOP}")
    failed = book.kernel.run(f"{TWO}\n1/0")
    assert failed.error is not None
    assert "model, opt: what --keep had left on the ranks is dropped" in failed.stdout
    assert "--keep" not in book.kernel.run(f"{TWO}\n1/0").stdout
    book(f"{TWO} --keep cache\ncache = [rank]")
    assert "cache: lived on these ranks only" in book("%distributed restart").stdout
    book(f"{TWO} --keep model,opt{LOOP}")
    book(f"{TWO}\n_ = model, opt")
    assert "--keep" not in book("%distributed stop").stdout


def test_a_model_that_a_cell_divides_by_itself_stays_and_goes_on(book: Notebook) -> None:
    book("from torch import nn\nplain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))")
    said = book.kernel.run(
        "%%distributed -s none --devices 2\nimport copy\nfrom torch.distributed.fsdp import fully_shard\n"
        "own = copy.deepcopy(plain)\nfor part in own:\n    fully_shard(part)\nfully_shard(own)\n"
        "adam = torch.optim.Adam(own.parameters())\nown(torch.ones(1, 4)).sum().backward(); adam.step()"
    )
    assert said.error is None, said.text
    assert "own, part stay on the ranks, the notebook has handles for them: its weights" in said.stdout
    assert "bound to the ranks' process group" in said.stdout
    book("%%distributed -s none --devices 2\nown(torch.ones(1, 4)).sum().backward(); adam.step()")
