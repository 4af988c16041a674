"""Who holds what: one side's view of the object graph that notebook and ranks share.

Every object with an identity of its own (a list, a dict, a module, a tensor, a function, an instance)
is a *node*: it has a key that both sides know, and each side has its own object under that key. What a
node looked like when both sides agreed is remembered (`seen`), so a walk below some names finds

    new nodes       the other side makes them          Make(key, kind, how to make it)
    changed nodes   the other side edits its own       Put(key, what it holds now)
    all the rest    costs a look, and nothing is sent

The walk is the same in both directions: going out it finds what the notebook changed between cells,
coming home it finds what the cell changed. What it sends is edited *into* the receiver's objects, so
identity, aliases and cycles hold on both sides.

    object_table.py  the nodes of one side
    held_objects.py  asks kinds what objects hold
    find_changes.py  what changed, and what cannot travel
    open_parcel.py   a parcel opened and put in place
    rank_paths.py    which of its own objects another rank has under a key
"""
