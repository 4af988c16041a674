"""Ranks on several machines. On each runs a node (`python -m nbtrain node TICKET`), which has its ranks as
a local pool has them, and speaks with the kernel for all of them: one connection a machine.

ticket.py            what a machine needs to take part: addresses, keys, until when
lobby.py             the kernel's end: listens, lets machines in, sends and receives in a thread of its own
admission.py         who may take part, and by which ticket
node.py              a machine's end; node_channel.py: its connection; join_message.py: its first words
numbered_frames.py   nothing is lost when a connection drops: frames are numbered, and sent again
protocol.py          what kernel and nodes say to each other
same_machine.py      whether a node is on the kernel's own machine
parcels_over_wire.py shared memory of the sender's machine, copied into the receiver's
mirrored_board.py    the board of the pool, kept alike on all machines
machines.py          what a machine says of itself
resolve_machines.py  which ranks `--nodes 2 --devices 4` means
doors.py             what starts nodes, and whose machines are whose
pool.py              the pool as the session sees it
notebook_environ.py  which environment variables go to other machines
"""
