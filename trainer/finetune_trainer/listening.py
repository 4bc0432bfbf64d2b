"""Sockets on machines with IPv4, with IPv6 or with both."""

import errno
import socket
from contextlib import suppress

LOOPBACKS = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
"""Addresses by which a machine reaches itself, the preferred first."""
NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
"""Errors of a machine whose IPv6 is switched off."""


def listen_on_all_addresses(port: int) -> socket.socket:
    """Return a socket that takes connections by IPv4 and, if the machine has it, by IPv6."""
    # A cluster may give its pods addresses of either kind only.
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port))
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    except OSError as error:
        if error.errno not in NO_IPV6:
            raise
    return socket.create_server(("", port))


def loopback() -> str:
    """Return the address by which this machine reaches itself: 127.0.0.1, or ::1 if there is no IPv4."""
    for address, family in LOOPBACKS.items():
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    # On a machine without either, the caller's own error names the address.
    return "127.0.0.1"


def listen_on_loopback(port: int = 0) -> socket.socket:
    """Return a socket to which only this machine can connect; port 0 means any free port."""
    address = loopback()
    return socket.create_server((address, port), family=LOOPBACKS[address])


def free_port() -> int:
    """Return a port on which no process listens at the moment."""
    # Another process may take the port meanwhile. The server then exits, and the error has the last lines of its log.
    with listen_on_loopback() as probe:
        port: int = probe.getsockname()[1]
    return port


def url_host(address: str) -> str:
    """Return an address as the host of a URL: IPv6 in brackets."""
    if ":" in address:
        return f"[{address}]"
    return address
