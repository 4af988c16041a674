"""Finds and applies changes in the graph of objects that notebook and ranks share.

Every object with an identity of its own (a list, a dict, a module, a tensor, a function, an instance)
is a *node*: it has a key that both sides know, and each side has its own object under that key. What a
node looked like when both sides agreed is remembered (`seen`), so a walk below some names finds

    new nodes       the other side makes them          MakeTwin(key, kind, how to make it)
    changed nodes   the other side edits its own       EditTwin(key, what it holds now)
    all the rest    costs a look, and nothing is sent

The walk is the same in both directions: going out it finds what the notebook changed between cells,
coming home it finds what the cell changed. What it sends is edited *into* the receiver's objects, so
identity, aliases and cycles hold on both sides.

    object_table.py  the nodes of one side
    held_objects.py  lists what objects hold
    find_changes.py  finds what changed, and what cannot travel
    open_parcel.py   opens a parcel and puts in place what it says
    edit_in_place.py lets the receiver's own object become what arrived: DataFrames, what a local module's file made
    held_ids.py      finds containers that hold `id(p)`
    object_path.py   writes paths: `cfg["tags"][3].name`
    rank_paths.py    finds a rank's own object for one that the lead made
"""
