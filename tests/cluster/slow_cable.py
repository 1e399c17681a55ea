"""A slow and lossy cable between two network namespaces, where the kernel has no netem: slow_cable.py HERE THERE

Gives each namespace a device eth0 and carries the packets between them, every one 200 ms late, each twentieth lost.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

SECONDS = 0.2
LOST = 0.05
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000


def device(namespace: str) -> int:
    """eth0 of that namespace: what is read from it was sent there, what is written to it arrives there."""
    with open(f"/run/netns/{namespace}") as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
    return tun


def carry(ends: tuple[int, int]) -> None:
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    chance = random.Random(0)
    on_its_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = None if not on_its_way else max(0.0, on_its_way[0][0] - time.monotonic())
        for end in select.select(ends, (), (), wait)[0]:
            packet = os.read(end, 65536)
            if chance.random() >= LOST:
                on_its_way.append((time.monotonic() + SECONDS, other[end], packet))
        while on_its_way and on_its_way[0][0] <= time.monotonic():
            _, to, packet = on_its_way.popleft()
            os.write(to, packet)


if __name__ == "__main__":
    ends = device(sys.argv[1]), device(sys.argv[2])
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    carry(ends)
