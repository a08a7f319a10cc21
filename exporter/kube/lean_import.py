"""The HTTP client of kubernetes_asyncio, imported without its 850 model modules.

Its packages import a class for every type and group of Kubernetes. That took a third of our start
time (0.3 s) and a third of the memory for a small cluster (32 MiB). We use none of these classes,
because requests return bytes. `tests/unit/kube/test_lean_import.py` says when this file can be
dropped.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


@contextmanager
def _empty_packages() -> Iterator[None]:
    """Replace two packages by empty ones, so that only modules imported by name are loaded.

    Afterwards a normal import loads the packages in full.
    """
    empty: list[str] = []
    path: list[str] | None = None
    for name in ("", ".client"):
        package = ModuleType(f"kubernetes_asyncio{name}")
        spec = PathFinder.find_spec(package.__name__, path)
        if spec is None or package.__name__ in sys.modules:
            continue
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
        path = package.__path__
        sys.modules[package.__name__] = package
        empty.append(package.__name__)
    try:
        yield
    finally:
        for name in empty:
            del sys.modules[name]


with _empty_packages():
    from kubernetes_asyncio.client.rest import RESTClientObject


class HttpClient(RESTClientObject):
    """Sends requests through an HTTP session that decides about TLS."""

    def __init__(self, session: Any, *, server_name: str | None, proxy: str | None) -> None:
        """The base class would load the system's CAs each time, for nothing.

        Its own session trusts other certificates, and takes proxies and passwords from the
        environment and ~/.netrc.
        """
        # The stubs know no None.
        self.pool_manager, self.server_hostname = session, server_name  # type: ignore[assignment]
        self.proxy, self.proxy_headers = proxy, None  # type: ignore[assignment]
