"""What everything speaks in: errors, messages, events, words for people. Imports nothing else of nbtrain.

errors.py               what nbtrain raises
messages.py             what the kernel tells a rank
events.py               what a rank tells the kernel
specs.py                what the user asked for: `RunSpec`, `PoolSpec`
keyboard_interrupts.py  presses on Stop: a double click is one; held back while something must not be cut in two
awake_time.py           limits of time that a sleeping laptop does not use up
humanize.py             numbers, sizes and durations for people; tables.py: tables of them
empty_models.py         `nbtrain.empty()`
atomic_write.py         a file of the user's is there whole, or as it was
installed_files.py      which files nobody edits between two cells
when_imported.py        what is done once a module is imported
quick_pickle.py         small frozen dataclasses on their way, quickly
"""
