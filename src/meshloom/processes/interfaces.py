"""Network interfaces of this host: their addresses, and the address at which Gloo will be reached."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

from meshloom import settings

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # the first IPv4 address of an interface (Linux)


def interfaces() -> dict[str, list[str]]:
    """The addresses of every interface, by its name.

    >>> interfaces().get("lo", ["127.0.0.1"])[0]
    '127.0.0.1'
    """
    found: dict[str, list[str]] = {name: _ipv4(name) for _, name in socket.if_nameindex()}
    for line in _lines("/proc/net/if_inet6"):
        digits, _, _, _, _, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


def _ipv4(name: str) -> list[str]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has none
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def interface_of(address: str) -> str | None:
    """The interface that has an address, if it is one of this host."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next(
        (name for name, found in interfaces().items() if wanted in map(ipaddress.ip_address, found)),
        "lo" if wanted.is_loopback and "lo" in interfaces() else None,  # all of 127.0.0.0/8
    )


def is_loopback(address: str) -> bool:
    """Whether only its own host can reach an address.

    >>> is_loopback("127.0.1.1"), is_loopback("192.0.2.1"), is_loopback("::1")
    (True, False, True)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def gloo_address() -> str | None:
    """Where Gloo will listen: at the named interface, else where this host's own name leads; None if there is none."""
    if named := settings.read(VARIABLE):
        known = interfaces()
        return next((address for name in named.split(",") for address in known.get(name, ())), None)
    try:
        own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        own = []
    return next((str(place[0]) for *_, place in own if is_local(str(place[0]))), "127.0.0.1")  # as Gloo does


def is_local(address: str) -> bool:
    """Whether an address is one of this host, so that one can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def machine() -> str:
    """What tells one host, or one container with a network of its own, from another."""
    boot = "".join(_lines("/proc/sys/kernel/random/boot_id")) or socket.gethostname()
    network = "/proc/self/ns/net"
    return f"{boot} {os.readlink(network) if os.path.islink(network) else ''}"
