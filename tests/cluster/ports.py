"""Loopback ports that stay reserved while a server restarts."""

import atexit
import random
import socket
from contextlib import ExitStack, suppress


# These ports are below the kernel's ephemeral range. Otherwise a client's connection may use the
# port of a killed server when the server restarts.
_CANDIDATES = range(20_000, 32_000)


def free_port(count: int = 1) -> int:
    """Find a free loopback port that no other test gets meanwhile.

    With `count`, it is the first of `count` consecutive free ports.
    """
    for port in random.sample(_CANDIDATES, 100):
        with ExitStack() as names, suppress(OSError):
            for number in range(port, port + count):
                name = names.enter_context(socket.socket(socket.AF_UNIX))
                # The name reserves the port, because no other test process can bind the same name.
                name.bind(f"\0exporter-test-port-{number}")
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            atexit.register(names.pop_all().close)
            return port
    message = "no free port"
    raise OSError(message)
