"""A cable that takes its time: carries frames between two TAP devices, each way `DELAY_S` later.

    python delay_relay.py DELAY_S NAMESPACE DEVICE NAMESPACE DEVICE

Makes the devices (the first in one network namespace, the second in the other), says `ready` and runs until killed;
with it the devices go. Offloads pass through (`IFF_VNET_HDR`), so that a frame may be 64 KiB of TCP.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TCP segmentation over IPv4 and IPv6
MOST_FRAME_BYTES = 70_000
MOST_IN_FLIGHT = 20_000
"""Frames on their way in one direction; what comes on top is dropped, as a switch would."""
CLONE_NEWNET = 0x40000000


def make_tap(namespace: str, device: str) -> int:
    inside = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(inside, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(inside)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETOFFLOAD, OFFLOADS)
    return fd


def relay(first: int, second: int, delay_s: float) -> None:
    other = {first: second, second: first}
    under_way: dict[int, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}
    poll = select.poll()
    for fd in other:
        poll.register(fd, select.POLLIN)
    while True:
        now_s = time.monotonic()
        for fd, frames in under_way.items():
            while frames and frames[0][0] <= now_s:
                send(fd, frames.popleft()[1])
        due_s = min((frames[0][0] for frames in under_way.values() if frames), default=now_s + 3600)
        for fd, _ in poll.poll(max(0.0, due_s - time.monotonic()) * 1000):
            receive(fd, under_way[other[fd]], time.monotonic() + delay_s)


def receive(fd: int, frames: "deque[tuple[float, bytes]]", due_s: float) -> None:
    try:
        while True:
            frame = os.read(fd, MOST_FRAME_BYTES)
            if len(frames) < MOST_IN_FLIGHT:
                frames.append((due_s, frame))
    except BlockingIOError:
        return
    except OSError:  # the device is down: a cut cable
        time.sleep(0.01)


def send(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except OSError:  # down, or its queue is full: the frame is lost, as on a real cable
        return


def main() -> None:
    delay_s, (near, near_device, far, far_device) = float(sys.argv[1]), sys.argv[2:6]
    ends = make_tap(near, near_device), make_tap(far, far_device)
    print("ready", flush=True)
    relay(*ends, delay_s)


if __name__ == "__main__":
    main()
