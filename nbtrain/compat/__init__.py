"""The only place that touches other people's internals: names with a leading underscore, private modules, behaviour
that no documentation promises.

One file for each foreign thing. Outwards it speaks nbtrain's own terms (`drop_held_back(param)`); inwards every use
says why, and in which versions the name is there, where that is not all of them. `its.check()` of a file says what
the installed version lacks: `strategy_packages.py` asks before a strategy is set up, so that what does not fit is
refused in a sentence.

A new torch: `make compat TORCH=…` runs tests/compat there, one small test for each thing that a file here relies on.
What fails has a name, and is mended in the file of that name.
"""
