"""Loopback ports that a server can come back to."""

import random
import socket


# Below the kernel's ephemeral range: else a client's own connection may sit on a killed server's
# port when the server returns.
_CANDIDATES = range(20_000, 32_000)


def free_port() -> int:
    """Find a loopback port that nobody listens on."""
    for port in random.sample(_CANDIDATES, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    message = "no free port"
    raise OSError(message)
