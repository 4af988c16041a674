"""Starts, keeps, replaces and ends the notebook's ranks.

pool_manager.py    starts, replaces and ends them
rank_talk.py       messages and events; which ranks are there, and which died
status.py          `%distributed status`
idle_release.py    cards that nobody has used for a while
other_versions.py  packages that another machine has in another version
"""
