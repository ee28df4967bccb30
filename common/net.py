"""Addresses of this machine."""

from __future__ import annotations

import socket
from pathlib import Path


def own_address_towards(address: str) -> str:
    """The IP address under which a peer at ``tcp://host:port`` reaches this machine: that of the outgoing interface.

    No packet is sent: connecting a UDP socket only asks the kernel for the route. ``ipc://`` peers are on this machine.
    """
    if not address.startswith("tcp://"):
        return "127.0.0.1"
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family, kind, proto, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def outgoing_ports() -> range:
    """The TCP ports from which the kernel takes one for each outgoing connection (ip(7), ``ip_local_port_range``).

    Not for a service: any process may hold one just when the service starts or starts again, and over loopback a peer that
    reconnects while nobody listens may get the very port that it connects to, and so talk to itself.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    return range(first, last + 1)
