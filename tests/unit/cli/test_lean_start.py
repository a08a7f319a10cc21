"""What a start imports, and whether each measure for a fast start is still needed."""

import subprocess
import sys
import textwrap

import pytest


def run(program: str) -> str:
    """Run a program in a new interpreter; returns its output."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


START = """
import sys
before = set(sys.modules)
from exporter.cli import commands
from exporter.cli.lean_start import lean_imports
with lean_imports():
    from exporter import app
loaded = set(sys.modules) - before
"""

LIBRARIES = {
    "aiohappyeyeballs", "aiohttp", "aiosignal", "attr", "frozenlist", "idna",
    "kubernetes_asyncio", "msgspec", "multidict", "prometheus_client", "propcache", "six",
    "structlog", "typing_extensions", "yaml", "yarl",
}  # fmt: skip
SPARED = ("cli.client", "cli.layout", "demo", "runbooks", "server.page.", "whatif")
"""Parts of the exporter that only the page, the commands or the demo use."""


def test_a_start_imports_these_libraries_and_no_other() -> None:
    """A start does not import libraries that only the page, the terminal or the demo use."""
    loaded = run(f"{START}\nprint(*loaded)").split()
    compiled = {"_yaml", "cython_runtime"}
    roots = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - compiled
    roots = {root for root in roots if not root.startswith(("_cython", "_sysconfigdata", "__"))}

    assert roots - {"exporter", "greenlet"} <= LIBRARIES
    assert roots >= {"aiohttp", "kubernetes_asyncio", "msgspec", "structlog"}
    ours = [name.removeprefix("exporter.") for name in loaded if name.startswith("exporter.")]
    assert not [name for name in ours if name.startswith(SPARED)]


def test_the_machines_certificates_are_not_read() -> None:
    """Aiohttp's default TLS contexts, which nothing uses, load no certificates."""
    count = "len(aiohttp.connector._SSL_CONTEXT_VERIFIED.get_ca_certs())"
    assert run(f"{START}\nimport aiohttp\nprint({count})") == "0"


@pytest.mark.parametrize("before", ["'/somewhere/ca.crt'", "None"])
def test_everything_is_as_before_afterwards(before: str) -> None:
    """After `lean_imports` the environment, rich and the garbage collector are as before."""
    text = run(
        f"""
        import gc, os, sys
        os.environ.pop("SSL_CERT_FILE", None)
        if {before}:
            os.environ["SSL_CERT_FILE"] = {before}
        {textwrap.indent(START, " " * 8)}
        import rich.console
        print(os.environ.get("SSL_CERT_FILE") == {before})
        print(gc.isenabled())
        """
    )
    assert text.split() == ["True", "True"]


def test_rich_stays_loaded_if_it_was() -> None:
    """Rich stays loaded if it was loaded before."""
    assert run(f"import rich\n{START}\nprint(sys.modules['rich'] is rich)") == "True"


def test_aiohttp_still_reads_certificates_when_it_is_imported() -> None:
    """If importing aiohttp reads no certificates, drop SSL_CERT_FILE from `lean_imports`."""
    program = """
    import ssl
    read = []
    real = ssl.SSLContext.set_default_verify_paths
    ssl.SSLContext.set_default_verify_paths = lambda one: (read.append(1), real(one))[1]
    import aiohttp
    print(len(read))
    """
    assert int(run(program)) > 0


def test_structlog_still_loads_rich() -> None:
    """If importing structlog does not load rich, drop rich from `lean_imports`."""
    assert run("import structlog, sys\nprint('rich' in sys.modules)") == "True"
