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


__all__ = [
    "ApiClient",
    "ConfigException",
    "Configuration",
    "ExecProvider",
    "credentials",
    "kube_config",
]


@contextmanager
def _empty_packages() -> Iterator[ModuleType]:
    """Replace three packages by empty ones, so that only modules imported by name are loaded.

    Yields the empty `kubernetes_asyncio.client`. Afterwards a normal import loads the packages in
    full.
    """
    empty: dict[str, ModuleType] = {}
    path: list[str] | None = None
    for name in ("", ".client", ".client.models"):
        package = ModuleType(f"kubernetes_asyncio{name}")
        spec = PathFinder.find_spec(package.__name__, path)
        if spec is None or package.__name__ in sys.modules:
            continue
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
        path = package.__path__
        empty[package.__name__] = sys.modules[package.__name__] = package
    try:
        yield sys.modules["kubernetes_asyncio.client"]
    finally:
        for name in empty:
            del sys.modules[name]


with _empty_packages() as _client:
    from kubernetes_asyncio.client.api_client import ApiClient
    from kubernetes_asyncio.client.configuration import Configuration

    _client.ApiClient, _client.Configuration = ApiClient, Configuration  # type: ignore[attr-defined]
    from kubernetes_asyncio import config as credentials
    from kubernetes_asyncio.config import kube_config
    from kubernetes_asyncio.config.config_exception import ConfigException
    from kubernetes_asyncio.config.exec_provider import ExecProvider
