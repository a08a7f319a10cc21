"""Loopback ports that stay reserved over a server's restart."""

import atexit
import random
import socket
from contextlib import ExitStack, suppress


# Below the kernel's ephemeral range: otherwise a client's connection may use the port of a killed
# server when the server restarts.
_CANDIDATES = range(20_000, 32_000)


def free_port(count: int = 1) -> int:
    """Find a free loopback port that no other test gets meanwhile.

    With a count: the first of that many free ports in a row.
    """
    for port in random.sample(_CANDIDATES, 100):
        with ExitStack() as names, suppress(OSError):
            for one in range(port, port + count):
                name = names.enter_context(socket.socket(socket.AF_UNIX))
                # No other test process can bind this name. It reserves the port until a server
                # binds it.
                name.bind(f"\0exporter-test-port-{one}")
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", one))
            atexit.register(names.pop_all().close)
            return port
    message = "no free port"
    raise OSError(message)
