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
    "function of a function": """
        a = 21
        def h(): return a
        def f(): return h() + 1
        --- ranks
        assert f() == 22
        --- here
        def h(): return a + 100
        --- ranks
        assert f() == 122""",
    "lambda": """
        k = 31; fs = [lambda v: v + k, {'deep': lambda: k}]; f = lambda v, q=k: q + v
        --- ranks
        assert fs[0](1) == 32 and fs[1]['deep']() == 31 and f(2) == 33
        --- here
        k = 34
        --- ranks
        assert fs[0](1) == 35 and f(2) == 33""",
    "method": """
        step = 41
        class A:
            def m(self): return self.x + step
            @classmethod
            def c(cls): return step
            @staticmethod
            def s(): return step
            @property
            def p(self): return step
        a = A(); a.x = 1; bound = a.m
        --- ranks
        assert (a.m(), A.c(), a.s(), a.p, bound()) == (42, 41, 41, 41, 42)
        --- here
        step = 43
        --- ranks
        assert (a.m(), A.c(), a.s(), a.p, bound()) == (44, 43, 43, 43, 44)""",
    "closure": """
        outer = 51
        def make(n):
            def inner():
                nonlocal n
                n += 1
                return n, outer
            return inner
        c = make(1)
        --- ranks
        first = c()
        --- here
        assert first == (2, 51) and c() == (3, 51); outer = 52
        --- ranks
        second = c()
        --- here
        assert second == (4, 52) and c() == (5, 52)""",
    "decorators": """
        import functools
        log_ = []; tag = 'z61'
        def wrapped(f):
            @functools.wraps(f)
            def w(*a): log_.append(tag); return f(*a)
            return w
        def times(n):
            def deco(f): return lambda *a: f(*a) * n
            return deco
        def named(cls): cls.tag = tag; return cls
        @wrapped
        @times(3)
        def f(x): return x + base
        base = 61
        @named
        class A: pass
        --- ranks
        assert f(1) == 186 and A.tag == 'z61' and log_ == ['z61']
        @wrapped
        def g(): return base
        assert g() == 61 and g.__name__ == 'g' and g.__wrapped__() == 61
        @named
        class B(A): pass
        --- here
        assert log_ == ['z61'] * 2 and B.tag == 'z61' and f(0) == 183 and g() == 61""",
    "defaults": """
        d = 71; store = []
        def f(a=d, *, kept=store): kept.append(a); return len(kept)
        d = 72
        --- ranks
        assert f() == 1 and f(5) == 2 and store == [71, 5]
        def g(x=d, *, s=store): return x, s
        --- here
        assert store == [71, 5] and g()[0] == 72 and g()[1] is store and f.__kwdefaults__['kept'] is store""",
    "comprehensions": """
        rows = [81, 82]; keep = lambda v: v > limit; limit = 81
        --- ranks
        x = 'mine'
        a = [x for x in rows if keep(x)]
        b = {x: [y + x for y in rows] for x in rows}
        c = sum(x for x in rows for x in [x + limit])
        d = {x % limit for x in rows}
        assert x == 'mine'
        --- here
        assert (a, b, c, d) == ([82], {81: [162, 163], 82: [163, 164]}, 325, {0, 1}) and x == 'mine'""",
    "nested scopes": """
        deep = 91
        --- ranks
        def f():
            def g():
                class C:
                    v = deep
                    def m(self): return [lambda: deep + self.v for _ in range(1)][0]()
                return C().m()
            return g()
        assert f() == 182
        --- here
        assert f() == 182; deep = 92
        --- ranks
        assert f() == 184""",
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
    "del": """
        gone, kept, d, l = 111, 112, {'a': 1, 'b': 2}, [1, 2, 3]
        --- ranks
        del gone, d['a'], l[0]
        --- here
        assert 'gone' not in globals() and d == {'b': 2} and l == [2, 3]
        del kept
        --- ranks
        assert 'kept' not in globals() and 'gone' not in globals()
        try: gone
        except NameError: pass
        else: raise AssertionError('it is still there')""",
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
    "class bodies, bases, metaclass keywords": """
        n = 121
        class Meta(type):
            def __new__(m, name, bases, body, factor=1, **kw):
                cls = super().__new__(m, name, bases, body); cls.factor = factor * n; return cls
            def __init__(cls, name, bases, body, **kw): super().__init__(name, bases, body)
        class Base(metaclass=Meta, factor=2):
            size = n
            table = {k: k for k in range(2)}
            for i in range(2): last = i
        --- ranks
        assert (Base.factor, Base.size, Base.table, Base.last) == (242, 121, {0: 0, 1: 1}, 1)
        class Child(Base, factor=3):
            size = Base.size + n
            def m(self): return super().__repr__(), __class__
        assert Child.factor == 363 and Child.size == 242 and Child().m()[1] is Child
        --- here
        assert Child.factor == 363 and type(Child) is Meta and Child().m()[1] is Child and issubclass(Child, Base)""",
    "f-strings": """
        value, width, name = 13.1, 8, 'q'
        class P:
            def __format__(self, spec): return f'<{spec}{name}>'
        p = P()
        --- ranks
        a = f'{value:{width}.1f}|{name!r:>{width - 3}}|{value=}|{p:x}|{f"{name + name}"}|{[v for v in name]}'
        --- here
        assert a == "    13.1|  'q'|value=13.1|<xq>|qq|['q']", a""",
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
    "match": """
        from dataclasses import dataclass
        import enum
        @dataclass
        class Point: x: int; y: int = 0
        class Colour(enum.Enum): RED = 1
        floor = 151; things = [Point(151, 2), {'k': 3, 'z': 4}, [1, 2, 3], Colour.RED, 'text']
        --- ranks
        out = []
        for t in things:
            match t:
                case Point(x=px, y=py) if px >= floor: out.append(('p', px, py))
                case {'k': v, **rest}: out.append(('d', v, rest))
                case [first, *others]: out.append(('l', first, others))
                case Colour.RED as c: out.append(('c', c))
                case str() | bytes(): out.append('s')
        --- here
        assert out == [('p', 151, 2), ('d', 3, {'z': 4}), ('l', 1, [2, 3]), ('c', Colour.RED), 's'], out
        assert out[3][1] is Colour.RED and (px, py, v, first, c) == (151, 2, 3, 1, Colour.RED)""",
    "walrus": """
        chunks = iter_ = [161, 0]; low = 5
        --- ranks
        if (n := len(chunks)) > 1 and (m := chunks[0]) > low: found = m
        sums = [tot := tot + c for c in chunks] if (tot := 1) else None
        while (left := len(chunks)) > 1: chunks.pop()
        --- here
        assert (n, m, found, sums, tot, left) == (2, 161, 161, [162, 162], 162, 1) and chunks == [161]
        assert iter_ is chunks""",
    "star import": """
        x = 171.0
        --- ranks
        from math import *
        y = floor(x) + int(sqrt(4))
        --- here
        assert y == 173 and floor(2.5) == 2""",
    "star import here": """
        from math import *
        x = 172.5
        --- ranks
        y = floor(x)
        --- here
        assert y == 172""",
    "except names": """
        class Odd(ValueError): pass
        def fail(): raise Odd(what)
        what = 'w181'; e = 'kept?'
        --- ranks
        try: fail()
        except (KeyError, Odd) as e: text = str(e), type(e) is Odd
        try: e
        except NameError: unbound = True
        --- here
        assert text == ('w181', True) and unbound and 'e' not in globals()""",
    "with as": """
        import contextlib, io
        seen = []
        @contextlib.contextmanager
        def scope(n):
            seen.append(('in', n)); yield n + base
            seen.append(('out', n))
        class C:
            def __enter__(self): return self
            def __exit__(self, *a): seen.append('C'); return True
        base = 191
        --- ranks
        with scope(1) as a, scope(2) as (b): both = a, b
        with C() as c: 1 / 0
        with contextlib.redirect_stdout(io.StringIO()) as out: print('caught')
        text = out.getvalue()
        --- here
        assert both == (192, 193) and text == 'caught\\n' and type(c) is C
        assert seen == [('in', 1), ('in', 2), ('out', 2), ('out', 1), 'C'], seen""",
    "type annotations": """
        from typing import get_type_hints
        class T: pass
        Alias = dict[str, T]
        --- ranks
        x: Alias = {'t': T()}
        y: 'Unknown'
        def f(a: Alias, *b: T) -> list[T]: return [a['t'], *b]
        class D:
            field: T
            other: Alias = x
        --- here
        assert type(x['t']) is T and D.other is x and 'y' not in globals()
        assert get_type_hints(f) == {'a': Alias, 'b': T, 'return': list[T]}
        assert D.__annotations__ == {'field': T, 'other': Alias}""",
    "conditional assignment": """
        cond, x = False, 201
        --- ranks
        if cond: x = 0
        y = x
        for i in []: x = 5
        try: x = undefined_anywhere
        except NameError: pass
        z = x
        --- here
        assert (x, y, z) == (201, 201, 201) and 'i' not in globals()""",
    "augmented assignment": """
        n, l, s, d = 211, [1], {1}, {'a': 1}; l2 = l; s2 = s
        class V:
            def __init__(self, v): self.v = v
            def __iadd__(self, o): self.v += o; return self
        v = V(1); v2 = v
        --- ranks
        n += 1; l += [2]; s |= {2}; d['a'] += n; v += 5; l[0] -= 1
        --- here
        assert n == 212 and l == [0, 2] and l2 is l and s2 is s and s == {1, 2} and d == {'a': 213} and v2 is v
        assert v.v == 6""",
    "an old iterator is not asked for": """
        it = iter(x for x in range(3)); data = [221, 222]
        --- ranks
        it = iter(data); first = next(it)
        --- here
        assert first == 221""",
    "a name that shadows a built-in": """
        def sum(v): return 'mine'
        list = [231]
        --- ranks
        x = sum(list), len(list)
        --- here
        assert x == ('mine', 1)
        del sum, list
        --- ranks
        x = sum(list((1, 2)))
        --- here
        assert x == 3""",
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
    "timeit": """
        calls = []; item = 251
        def call(): calls.append(item)
        --- ranks
        %timeit -n 1 -r 1 call()
        --- ranks
        r = %timeit -o -q -n 2 -r 1 call()
        best = r.loops
        --- ranks
        %%timeit -n 1 -r 1 start = item
        call(); start
        --- here
        assert calls == [251] * 4 and best == 2, calls""",
    "capture": """
        word = 'w261'
        --- ranks
        %%capture caught
        print(word); kept = word
        --- ranks
        text = caught.stdout
        --- here
        assert kept == 'w261' and text == 'w261\\n', text""",
    "prun": """
        def train(n): return n + bias
        bias = 271
        --- ranks
        %prun -q -l 3 out = train(1)
        --- here
        assert out == 272""",
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
    "shell lines of the output": """
        word = 'w301'
        --- ranks
        if rank == 0:
            !echo heard $word
        for w in ['a', 'b']:
            x = !echo {w}{word}
        --- here
        assert x[0] == 'bw301'""",
    "magic with an answer": """
        import os
        --- ranks
        here = %pwd
        --- here
        assert here == os.getcwd()""",
    "eval says what it needs": """
        hidden = 311
        --- ranks
        try: eval('hidden + 1')
        except NameError as error: said = str(error)
        --- here
        assert 'hidden' in said""",
    "imports of the notebook": """
        import collections as co, os.path
        from functools import partial as part
        --- ranks
        x = co.Counter('aab')['a'], os.path.basename('a/b'), part(max, 321)(1)
        import json as js
        from itertools import chain
        --- here
        assert x == (2, 'b', 321) and js.dumps([1]) == '[1]' and list(chain([1], [2])) == [1, 2]""",
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
    "what a generator function reads": """
        top = 341
        def count():
            for i in range(2): yield i + top
        --- ranks
        x = list(count())
        def more(): yield from count()
        --- here
        assert x == [341, 342] and list(more()) == [341, 342]""",
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


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="`except*` is of Python 3.11")
def test_except_star(notebook: Notebook) -> None:
    play(
        notebook,
        """
        def fail(): raise ExceptionGroup('g', [ValueError(n), KeyError('k')])
        n = 351
        --- ranks
        try: fail()
        except* ValueError as group: one = group.exceptions[0].args
        except* KeyError as other: two = other.exceptions[0].args
        --- here
        assert one == (351,) and two == ('k',) and 'group' not in globals()""",
    )


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
