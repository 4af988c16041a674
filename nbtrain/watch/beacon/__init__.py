"""Shows a kernel's ranks to other processes: a private file that names a socket, and the socket where it answers.

kernel_record.py  the file; those of dead kernels are removed
client.py         one connection: its requests, and messages that wait to be sent
listener.py       the kernel's side: answers, and sends the messages of the run

The server extension reads the file and asks at the socket: the page of all pools comes from there, and so do buttons
that work while the kernel is busy. The standard library is enough for all of it.
"""

from nbtrain.watch.beacon.kernel_record import BeaconRecord, here
from nbtrain.watch.beacon.listener import Beacon

__all__ = ["Beacon", "BeaconRecord", "here"]
