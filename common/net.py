"""Addresses of this machine."""

from __future__ import annotations

import ipaddress
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


def is_loopback(address: str) -> bool:
    """Whether a ``tcp://host:port`` or ``ipc://`` address can't be reached from another machine, whoever reads it.

    No name but localhost is looked up: each machine has its own answer, and that of this one (Debian's is 127.0.1.1 for its own name)
    says nothing of the others'.
    """
    if address.startswith(("ipc://", "inproc://")):
        return True
    host = _host_of(address)
    try:
        return _is_loopback_ip(host)
    except ValueError:
        return host.lower() == "localhost"


def listens_on_loopback(address: str) -> bool:
    """Whether who listens on ``address`` on this machine can't be reached from another one. Names are looked up, as ZeroMQ will."""
    if is_loopback(address):
        return True
    host = _host_of(address)
    if host in {name for _, name in socket.if_nameindex()}:  # which ZeroMQ takes before the name of a host
        return False
    try:
        return all(_is_loopback_ip(str(found[4][0])) for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError):  # no name of this machine's: there is nothing to listen on
        return False


def _host_of(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _is_loopback_ip(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback
