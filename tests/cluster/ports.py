"""Loopback ports that a server can come back to."""

import atexit
import random
import socket


# Below the kernel's ephemeral range: else a client's own connection may sit on a killed server's
# port when the server returns.
_CANDIDATES = range(20_000, 32_000)
_taken: list[socket.socket] = []
"""A name for each port of this process's, of which the kernel lets no other test process have one:
a port is picked some time before a server binds it."""


def free_port() -> int:
    """Find a loopback port that nobody listens on, and that no other test picks meanwhile."""
    for port in random.sample(_CANDIDATES, 100):
        name = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                name.bind(f"\0exporter-test-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                name.close()
                continue
        _taken.append(name)
        atexit.register(name.close)
        return port
    message = "no free port"
    raise OSError(message)
