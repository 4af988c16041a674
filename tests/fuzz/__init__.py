"""Random notebooks, each run twice: with `%%distributed` cells on real ranks, and in one process. Both must end alike.

form.py        a namespace as plain data: values, types, who is identical with whom, who shares memory
statements.py  what a cell may do with the objects there are
values.py      expressions for new objects, and for those there are
programs.py    whole notebooks; each is run in one process while it is made, so that it fits what it meets
sessions.py    the same cells in an IPython shell with real ranks
"""
