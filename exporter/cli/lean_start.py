"""Imports the main job with a fifth less CPU time and 4.5 MiB less memory.

Some imported libraries do work that is never used here; `lean_imports` prevents that work. A test
fails if a part of `lean_imports` is not needed any more.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lean_imports() -> Iterator[None]:
    """Make imports in the `with` block faster. Use this once, at the start of the program.

    - aiohttp would read the machine's CA certificates twice, for default TLS contexts. Every
      connection here has its own context.
    - structlog would load rich, if it is installed, for tracebacks. We print them plainly.
    - The garbage collector would run a hundred times, over objects that are never freed, and once
      more after the block.
    """
    certificates = os.environ.get("SSL_CERT_FILE")
    gc.disable()
    os.environ["SSL_CERT_FILE"] = os.devnull
    loaded = sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if loaded is None:
            del sys.modules["rich"]
        del os.environ["SSL_CERT_FILE"]
        if certificates is not None:
            os.environ["SSL_CERT_FILE"] = certificates
        gc.freeze()
        gc.enable()
