"""Addresses of this machine."""

from __future__ import annotations

import socket


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
