"""Helpers for tests of the history file: past migrations, files, waiting."""

import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from exporter.engine.facts.evidence import SavedVmi
from exporter.engine.facts.history import Migration
from exporter.engine.facts.model import Outcome
from exporter.history import VERSION, Head
from tests.cluster import VMIMS, VMIS, Client, poll, vmim
from tests.cluster.objects import Object
from tests.support.builders import transitions_json
from tests.support.lives import ended_state
from tests.support.program import Program


BRISK = {"historyInterval": "500ms"}
"""`kube` settings with a short interval."""
FAILURES = "kubevirt_eviction_exporter_task_failures_total"

_numbers = count(1)


def saved_vmi(made: Object, endings: int) -> SavedVmi:
    """What is saved of a VMI: `endings` migrations of a minute each, without VMIMs."""
    now = float(int(time.time()))
    metadata = made["metadata"]
    return SavedVmi(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        migrations={
            f"{metadata['uid'][:24]}{number:012x}": Migration(
                start=now - 60.0 * number - 60,
                end=now - 60.0 * number,
                outcome=Outcome.SUCCEEDED,
                handed_off=True,
            )
            for number in range(1, endings + 1)
        },
    )


def write_history(path: Path, *saved: SavedVmi) -> None:
    """Write a history file."""
    lines = [Head(time.time(), VERSION), *saved]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_counts(path: Path) -> dict[str, int]:
    """The number of migrations of each VMI in a history file, by UID; empty if it is no history."""
    lines = path.read_bytes().splitlines()[1:] if path.exists() else []
    try:
        saved = [msgspec.json.decode(line, type=SavedVmi) for line in lines]
    except msgspec.DecodeError:
        return {}
    return {vmi.uid: len(vmi.migrations) for vmi in saved}


async def until_saved(path: Path, uid: str, migrations: int) -> None:
    """Wait until this many migrations of a VMI are in the file."""

    async def is_so() -> bool:
        return read_counts(path).get(uid) == migrations

    await poll(is_so, what=f"{migrations} migrations in {path}")


async def until_written(exporter: Program) -> None:
    """Wait until the file is written that has everything of now."""
    asked = (await exporter.get("/v1/status"))[1]["asOf"]

    def is_newer(_status: int, body: Any) -> bool:
        return bool((body["history"]["writtenAt"] or "") > asked)

    await exporter.until("/v1/status", is_newer)


async def until_failure(exporter: Program, event: str) -> None:
    """Wait until a failure of the history file is counted and in the log."""

    async def is_counted() -> bool:
        counted = await exporter.sample(FAILURES, task="history")
        return counted > 0 and bool(exporter.events(event))

    await poll(is_counted, what=event)


async def count_in_window(exporter: Program, namespace: str, name: str) -> int:
    """The migrations of a VMI in the window; -1 if the VMI is unknown."""
    verdict = await exporter.verdict(namespace, name, dryRun=True)
    return int(verdict["migrationsInWindow"]) if verdict["known"] else -1


async def until_counted(exporter: Program, namespace: str, name: str, migrations: int) -> None:
    """Wait until this many migrations of a VMI are in the window."""

    async def is_so() -> bool:
        return await count_in_window(exporter, namespace, name) == migrations

    await poll(is_so, what=f"{migrations} migrations of {name}")


async def migrate(
    admin: Client, namespace: str, name: str, *, ago: Iterable[float], forget: bool = True
) -> None:
    """Create migrations that took ten seconds and ended `ago` seconds ago.

    With `forget` their VMIMs are deleted, so the cluster shows at most the last migration.
    """
    now = int(time.time())
    for seconds in sorted(ago, reverse=True):
        migration = await admin.create(VMIMS, vmim(f"m{next(_numbers)}", namespace, of=name))
        end = now - seconds
        state = ended_state(migration["metadata"]["uid"], end - 10, end)
        final = {
            "phase": "Succeeded",
            "phaseTransitionTimestamps": transitions_json(Scheduled=end - 12, Succeeded=end),
            "migrationState": state,
        }
        made = migration["metadata"]["name"]
        await admin.merge(VMIS, namespace, name, {"status": {"migrationState": state}})
        await admin.merge_status(VMIMS, namespace, made, final)
        if forget:
            await admin.delete(VMIMS, namespace, made)
