"""The import of kubernetes_asyncio without its models, and a check that it is still needed."""

import subprocess
import sys


MODELS = "sum(name.startswith('kubernetes_asyncio.client.models.') for name in sys.modules)"


def models_after(*imports: str) -> int:
    """The number of model modules that a new interpreter has loaded after these imports."""
    statements = ["import sys", *(f"import {name}" for name in imports), f"print({MODELS})"]
    program = [sys.executable, "-c", "\n".join(statements)]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


def test_no_models_are_loaded() -> None:
    """Our client loads no model module."""
    assert models_after("exporter.kube.client") == 0


def test_a_later_import_is_complete() -> None:
    """Importing kubernetes_asyncio after our client still loads every model."""
    later = models_after("exporter.kube.client", "kubernetes_asyncio.client")
    assert later == models_after("kubernetes_asyncio.client")


def test_it_is_still_needed() -> None:
    """If this fails, kubernetes_asyncio loads its models lazily: delete `kube/lean_import.py`."""
    assert models_after("kubernetes_asyncio.client") > 500
