"""Random notebooks, each run twice: with `%%distributed` cells on real ranks, and in one process. Both must end alike.

Random object graphs (tests/ranks/test_fuzz.py):

form.py        a namespace as plain data: values, types, who is identical with whom, who shares memory
statements.py  what a cell may do with the objects there are
values.py      expressions for new objects, and for those there are
programs.py    whole notebooks; each is run in one process while it is made, so that it fits what it meets
sessions.py    the same cells in an IPython shell with real ranks
notebooks.py   draws notebooks, plays them, and compares

Random training programs (tests/ranks/test_fuzz_training.py, `python -m tests.fuzz`):

architectures.py  small models of every kind
loops.py          forms of a loop, and optimizers
edits.py          what people do around a step, and at which places of a loop
training.py       a program: drawn from a seed, written as a notebook, made smaller
held.py           what a notebook holds of a training, and where two differ
player.py         the processes that play programs
verdicts.py       right, refused in words, or wrong
common_edits.py   the fixed programs of docs/edits.md, played by `.ci/edits`
edits_page.py     that page, written and read
"""
