"""A switch in user space between hosts that are namespaces, with links as poor as a file says.

Usage: python switch.py FOLDER HOSTS, in a network namespace of its own. It makes TAP devices tap1, tap2, ..., which are
moved to the hosts, and reads FOLDER/links.json again whenever it changes: {"2": {"delay_ms": 50, "loss": 0.01, "mbit":
100, "largest": 1400, "down": true, "inbound": [22]}, "cuts": [[1, 2]]}. A link's loss and delay count at each end;
`largest` is of a packet, in bytes: longer ones vanish; `inbound` are the ports that may be entered; a cut is one way.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import pathlib
import random
import select
import struct
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_IPV4, _IPV6, _TCP, _UDP, _SYN, _ACK = 0x0800, 0x86DD, 6, 17, 2, 16
_HEADER = 14  # bytes of Ethernet's


def main(folder: str, hosts: int) -> None:
    taps = {host: _tap(f"tap{host}") for host in range(1, hosts + 1)}
    files = {tap: host for host, tap in taps.items()}
    path, read_at, links = pathlib.Path(folder, "links.json"), 0, dict[str, dict]()
    queue, free_at, numbers, chance = [], {}, itertools.count(), random.Random(0)  # (due, number, host, frame)
    print("ready", flush=True)
    while True:
        wait = min(0.02, max(0.0, queue[0][0] - time.monotonic())) if queue else 0.02
        ready = select.select(list(files), [], [], wait)[0]
        if (changed := path.stat().st_mtime_ns) != read_at:
            read_at, links = changed, json.loads(path.read_text())
        now = time.monotonic()
        for tap in ready:
            frame, sender = os.read(tap, 4096), files[tap]
            # Hosts have the addresses 02:53:00:00:00:01, ...; others are of all.
            receivers = [host for host in taps if host != sender and (frame[0] & 1 or frame[5] == host)]
            for host in receivers:
                ends = [links.get(str(end), {}) for end in (sender, host)]
                if [sender, host] in links.get("cuts", []) or not _passes(frame, ends):
                    continue
                if any(chance.random() < end.get("loss", 0.0) for end in ends):
                    continue
                due = now
                for end, way in zip(ends, ((sender, "out"), (host, "in")), strict=True):
                    if "mbit" in end:
                        due = free_at[way] = max(due, free_at.get(way, 0.0)) + len(frame) * 8 / end["mbit"] / 1e6
                    due += end.get("delay_ms", 0.0) / 1000
                heapq.heappush(queue, (due, next(numbers), host, frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, host, frame = heapq.heappop(queue)
            if not links.get(str(host), {}).get("down"):
                with contextlib.suppress(OSError):  # the host's device is down
                    os.write(taps[host], frame)


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def _passes(frame: bytes, ends: list[dict]) -> bool:
    if any(end.get("down") or len(frame) - _HEADER > end.get("largest", 1 << 16) for end in ends):
        return False
    kind = int.from_bytes(frame[12:14], "big")
    if "inbound" not in ends[1] or kind not in (_IPV4, _IPV6):
        return True
    protocol, start = (frame[23], _HEADER + (frame[14] & 15) * 4) if kind == _IPV4 else (frame[20], _HEADER + 40)
    begins = protocol == _UDP or (protocol == _TCP and frame[start + 13] & (_SYN | _ACK) == _SYN)
    return not begins or int.from_bytes(frame[start + 2 : start + 4], "big") in ends[1]["inbound"]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
