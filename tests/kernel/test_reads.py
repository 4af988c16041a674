"""What a distributed cell reads is there, whatever it is written in: each shape in a real kernel, on two ranks.

Ranks are kept from test to test, and each value is one that no earlier test had: what is stale is seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.notebook import Notebook
from tests.support.story import notebook, play, warm_ranks

__all__ = ["notebook", "warm_ranks"]

pytestmark = pytest.mark.kernel


STORIES = {
    "function": """
        g = 11
        def f(): return g
        --- ranks
        x = f()
        --- here
        assert x == 11; g = 12
        --- ranks
        assert f() == 12; x = f()
        --- here
        assert x == 12""",
    "global": """
        count = 101
        def bump():
            global count, made
            count += 1
            made = [count]
        --- ranks
        bump(); bump()
        assert count == 103 and made == [103]
        --- here
        assert count == 103 and made == [103]; bump()
        --- ranks
        def erase():
            global made, count
            del made
            count = -1
        erase()
        --- here
        assert count == -1 and 'made' not in globals()""",
    "a function that the notebook deletes": """
        def f(): return 'one'
        --- ranks
        assert f() == 'one'
        --- here
        del f
        def call(): return f()
        --- ranks
        try: call()
        except NameError: seen = True
        --- here
        assert seen
        def f(): return 'two'
        --- ranks
        assert call() == 'two'""",
    "async": """
        import asyncio
        wait = 0.0; results = []
        async def fetch(i):
            await asyncio.sleep(wait)
            return i + offset
        async def many(n):
            for i in range(n): yield await fetch(i)
        class Ctx:
            async def __aenter__(self): return offset
            async def __aexit__(self, *e): results.append('left')
        offset = 141
        --- ranks
        one = await fetch(1)
        all_ = await asyncio.gather(*(fetch(i) for i in range(3)))
        async for v in many(2): results.append(v)
        async with Ctx() as c: results.append(c)
        lazy = [v async for v in many(2)]
        --- here
        assert one == 142 and all_ == [141, 142, 143] and lazy == [141, 142]
        assert results == [141, 142, 141, 'left'] and c == 141, results""",
    "time": """
        def work(n): return n * factor
        factor = 241
        --- ranks
        %time x = work(1)
        --- ranks
        %%time
        y = work(2)
        --- ranks
        z = %time work(3)
        --- here
        assert (x, y, z) == (241, 482, 723)""",
    "capture": """
        word = 'w261'
        --- ranks
        %%capture caught
        print(word); kept = word
        --- ranks
        text = caught.stdout
        --- here
        assert kept == 'w261' and text == 'w261\\n', text""",
    "matplotlib and env": """
        level = 'w281'
        --- ranks
        %matplotlib inline
        %env NBTRAIN_TEST_LEVEL=$level
        import matplotlib.pyplot as plt, os
        plt.plot([level]); x = os.environ['NBTRAIN_TEST_LEVEL']
        --- here
        assert x == 'w281' and plt.get_fignums() == []
        --- ranks
        try: get_ipython().enable_gui('qt')
        except Exception as error: said = str(error)
        --- here
        assert 'no screen' in said""",
    "shell lines": """
        word, number = 'w291', 291; d = {'k': [1, 2]}
        --- ranks
        lines = !echo $word {number + 1} {d['k'][1]} $$HOME {len(word)}
        rest = !echo one; echo two
        --- here
        import os
        assert list(lines) == [f"w291 292 2 {os.environ['HOME']} 4"] and rest.s == 'one two', (lines, rest)""",
    "eval says what it needs": """
        hidden = 311
        --- ranks
        try: eval('hidden + 1')
        except NameError as error: said = str(error)
        --- here
        assert 'hidden' in said""",
    "what is read only when called later": """
        table = {}
        --- ranks
        def later(): return table['x'] + extra
        --- here
        table['x'] = 331; extra = 1
        --- ranks
        assert later() == 332
        --- here
        assert later() == 332""",
    "IPython's own names stay on their side": """
        341 + 1
        --- ranks
        5 * 70
        --- ranks
        _ = [_ for _ in range(3)]
        --- here
        assert 342 in Out.values() and 350 not in Out.values(), Out""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=list(STORIES))
def test_reads(notebook: Notebook, story: str) -> None:
    play(notebook, story)


def test_a_callback_that_a_local_module_calls(notebook: Notebook, tmp_path: Path) -> None:
    """The module knows nothing of the notebook; what it is given reads the notebook's names."""
    (tmp_path / "local_trainer_361.py").write_text(
        "def run(step, n):\n    return [_once(step, i) for i in range(n)]\ndef _once(step, i):\n    return step(i)\n"
        "class Trainer:\n    def __init__(self, **hooks): self.hooks = hooks\n"
        "    def fit(self): return {k: f() for k, f in self.hooks.items()}\n"
    )
    play(
        notebook,
        f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        import local_trainer_361 as trainer
        rate = 361; seen = []
        def helper(i): return i * rate
        def step(i): seen.append(i); return helper(i)
        t = trainer.Trainer(done=lambda: helper(3), again=step.__call__ if False else lambda: rate)
        --- ranks
        out = trainer.run(step, 3); fitted = t.fit()
        --- here
        assert out == [0, 361, 722] and seen == [0, 1, 2] and fitted == {{'done': 1083, 'again': 361}}
        rate = 362
        --- ranks
        out = trainer.run(step, 2); fitted = t.fit()
        --- here
        assert out == [0, 362] and seen == [0, 1, 2, 0, 1] and fitted['again'] == 362
        sys.path.remove({str(tmp_path)!r})""",
    )
