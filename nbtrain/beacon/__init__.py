"""What a kernel shows of its ranks to others: a private file that says where it listens, and the socket where it does.

kernel_record.py  the file, who may write it, and what becomes of it when its kernel has died
readers.py        one who has connected: what he said, what he is still to be sent
listener.py       the kernel's side: answers, and streams the run there is

The server extension reads the file and asks at the socket: the page of all pools comes from there, and so do buttons
that work while the kernel is busy. The standard library is enough for all of it.
"""

from nbtrain.beacon.kernel_record import BeaconRecord, here
from nbtrain.beacon.listener import Beacon

__all__ = ["Beacon", "BeaconRecord", "here"]
