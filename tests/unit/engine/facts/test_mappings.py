"""A table is exempt from garbage collections, even if it was empty at `gc.freeze`."""

import subprocess
import sys

import pytest


SHOW = """
import gc
from exporter.engine.facts.mappings import Table

table = {kind}
gc.collect()
gc.freeze()
table[tuple("ab")] = ""
print(any(one is table for one in gc.get_objects()))
"""


@pytest.mark.parametrize(("kind", "is_visited"), [("Table()", False), ("{}", True)])
def test_a_table_is_not_visited_after_a_freeze(kind: str, is_visited: bool) -> None:
    """The collector visits a dict that was empty at the freeze, but no `Table`."""
    command = [sys.executable, "-c", SHOW.format(kind=kind)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    assert shown.stdout == f"{is_visited}\n"
