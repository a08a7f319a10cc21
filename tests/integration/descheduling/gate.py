"""How a descheduler moves VMs with and without its feature gate: rows of results.md."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.documents import GATE_RESULTS, build_table, fill, read


RESULTS = Path(__file__).parent / "gate.json"
COUNTED = ("background", "error")
"""The results by which the descheduler counts evictions that it has sent."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one cluster: its audit log, migrations and the descheduler's counts."""

    gate: bool
    held_by: str
    """What prevents moves of VMs: nothing, the plugin, or the webhook."""
    first_cycle: int
    """How many VMs were evicted in the descheduler's first cycle."""
    moved: int
    """How many VMs were migrated at least once."""
    migrations: int
    most: int
    """How often the VM with the most migrations was migrated."""
    counted: dict[str, int]
    """`descheduler_pods_evicted_total` by result."""


def keep(rows: Sequence[Row]) -> None:
    """Write the results, and the table of results.md."""
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    GATE_RESULTS.write_text(fill_table(read(GATE_RESULTS)), encoding="utf-8")


def fill_table(text: str) -> str:
    """The document with the table of the stored results."""
    rows = [Row(**result) for result in json.loads(RESULTS.read_bytes())]
    head = [
        "gate",
        "blocked by",
        "VMs evicted in the first cycle",
        "VMs moved",
        "migrations",
        "of one VM, at most",
        *(f"`{result}`" for result in COUNTED),
    ]
    cells = [
        [
            "on" if row.gate else "off",
            row.held_by,
            *map(str, (row.first_cycle, row.moved, row.migrations, row.most)),
            *(str(row.counted.get(result, 0)) for result in COUNTED),
        ]
        for row in rows
    ]
    return fill(text, {"gate": build_table(head, cells)})
