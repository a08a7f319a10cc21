"""The output of `node`."""

import re
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from exporter.cli.client import Exporter, NoSuchNode
from exporter.cli.drain import follow_drain, show_drain, show_nodes, write_bound
from exporter.engine.evacuations.conditions import read_conditions
from exporter.engine.evacuations.drain import forecast_node, forecast_nodes
from exporter.engine.facts.model import (
    KubeVirtSettings,
    MigrationLimits,
    Resource,
    Why,
    WhySource,
)
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.trust import Trust
from exporter.server.api.answers import describe_drain, list_nodes
from exporter.server.api.evacuation_schemas import DrainAnswer
from tests.support.builders import NOW, a_cordon, a_running_state, a_store, a_vmim
from tests.support.stores import ClockedStore, count_outcomes
from tests.unit.cli.answers import PIPED
from tests.unit.engine.evacuations.test_drain import a_failure, a_movable, a_moved
from tests.unit.engine.store.test_node_drains import a_drain, asked, now_in
from tests.unit.server.api.test_answers import some_health


def drain_of(store: ClockedStore, node: str = "n1") -> DrainAnswer:
    """The answer of GET /v1/nodes/{node}."""
    forecast, candidates = forecast_node(store, node, now_in(store))
    return describe_drain(forecast, candidates, now_in(store), some_health())


def shown(store: ClockedStore) -> str:
    """The output of `node n1`."""
    return show_drain(drain_of(store), PIPED)


def a_mixed_store() -> ClockedStore:
    """A store with VMs of five drain outcomes on n1, and a VM on n2."""
    return a_store(
        a_moved(1, 90.0),
        a_movable(2, migratable=False),
        a_movable(3, eviction_strategy="None"),
        a_movable(4, eviction_strategy="External"),
        a_movable(5, migration=a_running_state()),
        a_movable(6, node="n2"),
    )


def test_the_first_sentence_is_the_answer() -> None:
    """The first sentence says whether the node can be emptied, or which VMs stay and why."""
    store = a_store(a_moved(1, 90.0), now=NOW - 2000.0)
    assert shown(store).startswith("n1 can be emptied.\nIt takes at least 1m30s: ")

    why = Why(WhySource.LIVE_MIGRATABLE, "HostDeviceNotLiveMigratable")
    store.put(a_movable(2, migratable=False), (why,))
    stays = "shop/db2 stays (LiveMigratable: HostDeviceNotLiveMigratable)"
    assert shown(store).startswith(f"n1 cannot be emptied: {stays}.\n\nVMs: 2\n")

    store.put(a_movable(3, evacuation_node="n1"))
    store.put(a_failure(1, NOW - 500.0, vmi_name="db3"))
    fails = (
        "shop/db3 fails (failed attempts: 1; does not leave until somebody acts: its evacuation is"
        " stuck or fails)"
    )
    assert shown(store).startswith(f"n1 cannot be emptied: {stays}, {fails}.\n")

    store.put(a_movable(4, migratable=False))
    store.put(a_movable(5, migratable=False))
    refused = "never leaves: it is not migratable, and KubeVirt refuses its eviction"
    more = f"{stays}, {fails}, shop/db4 stays ({refused}) and 1 more"
    assert shown(store).startswith(f"n1 cannot be emptied: {more}.\n")


def test_vms_that_a_drain_stops_are_named_first() -> None:
    """A node can be emptied although the drain stops a VM, but the first lines name the VM."""
    store = a_store(a_moved(1, 90.0), a_movable(3, eviction_strategy="None"), now=NOW - 2000.0)

    assert shown(store).startswith(
        "n1 can be emptied.\nA drain stops shop/db3, which KubeVirt does not migrate.\n"
    )


def test_every_vm_has_its_row_the_gravest_first() -> None:
    """Each VM has a row, the worst outcome first, and the VMs are counted by outcome."""
    store = a_mixed_store()
    why = Why(WhySource.LIVE_MIGRATABLE, "HostDeviceNotLiveMigratable")
    store.put(a_movable(2, migratable=False), (why,))
    store.put(a_vmim(vmi_name="db4", phase="Failed", finished=True, finished_at=NOW - 5.0))
    text = shown(store)
    counts, _, rows = text.partition("A drain now\n")

    table, _, steps = rows.partition("\nNext steps\n")
    assert [re.split(r" {2,}", line.strip()) for line in table.splitlines()] == [
        ["VM", "OUTCOME", "LAST TOOK", "FAILED", "WHY"],
        ["shop/db2", "stays", "?", "0", "LiveMigratable: HostDeviceNotLiveMigratable"],
        [
            *("shop/db4", "external", "?", "1"),
            "waits for somebody else to move or stop it: strategy External",
        ],
        ["shop/db3", "restarts", "?", "0", "goes down: its strategy is None"],
        ["shop/db5", "waits", "?", "0", "waits: it migrates already"],
        ["shop/db1", "leaves", "1m30s", "0"],
    ]
    assert steps.startswith("  shop/db2  Remove what makes the VM non-migratable, ")
    assert "VMs: 5\n" in counts
    assert [line.split()[:2] for line in counts.splitlines()[-6:-1]] == [
        ["stays", "1"],
        ["external", "1"],
        ["restarts", "1"],
        ["waits", "1"],
        ["leaves", "1"],
    ]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        pytest.param(
            [a_movable(1)],
            "How long it takes is unknown: no VM that can migrate now has migrated before.",
            id="nothing-known",
        ),
        pytest.param(
            [a_moved(1, 90.0), a_moved(2, 30.0)],
            "It takes at least 1m30s: the longest of the last migrations took that long.",
            id="the-longest",
        ),
        pytest.param(
            [*(a_moved(n, 90.0) for n in (1, 2, 3)), a_movable(4)],
            "It takes at least 2m15s: the last migrations took 4m30s in all, and KubeVirt runs at"
            " most 2 at once from a node."
            " This ignores VMs without a known migration: 1.",
            id="the-limits",
        ),
        pytest.param(
            [
                *(a_moved(n, 90.0) for n in (1, 2, 3)),
                a_movable(4, migration=a_running_state(uid="m4")),
                a_vmim(name="mig-4", uid="m4", vmi_name="db4", phase="Running"),
            ],
            "It takes at least 2m15s: the last migrations took 4m30s in all, and KubeVirt runs at"
            " most 2 at once from a node.",
            id="what-migrates-already",
        ),
        pytest.param(  # db4, which migrates now, is in the sum and not in the bound
            [
                *(a_moved(n, 90.0) for n in (1, 2, 3)),
                a_moved(4, 50.0),
                a_vmim(name="mig-4", uid="m9", vmi_name="db4", phase="Running"),
                KubeVirtSettings(MigrationLimits(1, 2)),
            ],
            "It takes at least 4m30s: the last migrations took 5m20s in all.",
            id="the-limits-are-reached",
        ),
    ],
)
def test_the_bound_has_its_arithmetic(facts: list[Any], text: str) -> None:
    """The least time of a drain is shown with the durations and limits that determine it."""
    store = a_store(KubeVirtSettings(MigrationLimits(5, 2)), *facts)
    assert write_bound(drain_of(store)) == text


def test_a_cordoned_node_is_named_so() -> None:
    """The output says that a node is cordoned, since when (if known), and its conditions."""
    store = a_mixed_store()
    store.retain(Resource.NODES, {}, None)
    conditions = read_conditions(store, StuckPolicy(), Trust(), NOW)
    for node, text in (
        (a_cordon(), "has been cordoned since 2027-01-15T07:55:00Z (5m ago)"),
        (a_cordon(cordoned_at=None), "is cordoned"),
        (
            a_cordon(cordoned_at=None, conditions=("DrainInProgress",)),
            "is cordoned: DrainInProgress",
        ),
    ):
        store.put(node)
        answer = describe_drain(*forecast_node(store, "n1", conditions), conditions, some_health())
        assert f"\nIt {text}.\n" in show_drain(answer, PIPED)


def test_silence_is_a_warning() -> None:
    """Without contact with the API server the output has a warning."""
    store = a_mixed_store()
    forecasts = [*forecast_nodes(count_outcomes(store, now_in(store)), {})]
    answer = list_nodes(forecasts, ["shop"], NOW + 500.0, some_health())
    assert "Warning: no contact with the API server" in show_nodes(answer, PIPED)


def test_the_progress_of_a_drain_is_one_line_with_a_bar() -> None:
    """One line says how many VMs have left and at what interval, or for how long none has left."""
    moving = a_drain(NOW - 300, NOW - 200, NOW - 60, remaining=2)
    assert "Drain: [############........] 3 of 5 VMs have left, one every 2m, about 3m to go." in (
        shown(moving)
    )
    still = a_drain(NOW - 60, remaining=1)
    assert "[##########..........] 1 of 2 VMs have left, no VM has left for 1m." in shown(still)


def test_a_vm_that_stays_has_a_next_step() -> None:
    """The next steps are those of all VMs that keep the node from being emptied."""
    store = a_drain(remaining=1)
    store.put(asked(0, migratable=False))
    assert "Next steps\n  shop/db0  Remove what makes the VM non-migratable" in shown(store)


async def no_pause() -> None:
    """Ask again at once."""


class Answering:
    """An exporter that gives these answers about a node, which has no VMs after that."""

    def __init__(self, *answers: DrainAnswer) -> None:
        self._answers = list(answers)

    async def read_node(self, _node: str) -> bytes:
        """The next answer."""
        if not self._answers:
            raise NoSuchNode
        return msgspec.json.encode(self._answers.pop(0))


async def test_a_watched_drain_that_is_given_up() -> None:
    """An uncordon ends the watch of a drain, which says that it was a drain before."""
    draining = drain_of(a_drain(NOW - 60, remaining=1))
    asked = cast("Exporter", Answering(draining, replace(draining, drain=None)))
    ended = await follow_drain(asked, "n1", lambda _: None, pause=no_pause)
    assert ended == "n1 is not being drained any more; VMs on it: 1.\n"


async def test_a_drain_is_watched_to_its_end() -> None:
    """Each change of a drain is printed as a line; the result says how the drain ended."""
    store = a_drain(NOW - 60, remaining=1)
    asked = cast("Exporter", Answering(drain_of(store), drain_of(store)))
    lines: list[str] = []
    ended = await follow_drain(asked, "n1", lines.append, pause=no_pause)
    assert ended == "n1 has no VMs any more.\n"
    assert len(lines) == 1
    assert "1 of 2 VMs have left" in lines[0]
