"""Imports the parts of kubernetes_asyncio that we use, without its 850 model modules.

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


__all__ = ["ApiClient", "make_client"]


@contextmanager
def _empty_packages() -> Iterator[None]:
    """Replace three packages by empty ones, so that only modules imported by name are loaded.

    Afterwards a normal import loads the packages in full.
    """
    empty: list[str] = []
    path: list[str] | None = None
    for name in ("", ".client", ".client.models"):
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
    from kubernetes_asyncio.client.api_client import ApiClient
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject


def make_client(
    session: Any, *, server: str, server_name: str | None, proxy: str | None
) -> ApiClient:
    """A client for the API server at this URL, with an HTTP session that decides about TLS.

    Without a session, kubernetes_asyncio makes one that trusts other certificates, and takes
    proxies and passwords from the environment and ~/.netrc. The constructors are not called: they
    would load the system's CAs each time, for nothing.
    """
    client: Any = ApiClient.__new__(ApiClient)
    rest: Any = RESTClientObject.__new__(RESTClientObject)
    rest.pool_manager, rest.server_hostname = session, server_name
    rest.proxy, rest.proxy_headers = proxy, None
    client.configuration, client.rest_client = Configuration(), rest
    client.configuration.host = server
    client.default_headers, client.cookie = {"User-Agent": "kubevirt-eviction-exporter"}, None
    made: ApiClient = client
    return made
