"""What may be typed: `%distributed`, `%%distributed`, its line and verbs. Makes a `RunSpec` of it.

extension.py       the magics themselves
state.py           what they remember between cells
line/              the line: words, options, values, what they mean together
verbs.py           all verbs; debug_verb.py, join_verb.py, script_verb.py, strategy_table.py: what some of them do
cells.py           where the cell's own text begins; asked_cell.py: which cell a verb is about
completion.py      Tab
manual.py          `%%distributed?`
own_strategies.py  strategies from a cell or another package
"""
