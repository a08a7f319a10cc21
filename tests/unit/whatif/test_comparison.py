"""A comparison of policies as a table and as JSON."""

import json
import re

import pytest

from exporter.engine.facts.policy import Override, Policy, Reason, StuckPolicy
from exporter.whatif import comparison
from exporter.whatif.account import BUILTIN, Comparison, Contender
from exporter.whatif.comparison import to_json
from tests.unit.whatif.test_replay import HOUR, MINUTE, Tale


STUCK = "\nStuck evacuations, "


def a_comparison() -> Comparison:
    """A comparison: one VM is evicted three times, and another VM's evacuation is stuck."""
    return a_tale("stuck").played(
        3 * HOUR,
        *(BUILTIN[name] for name in ("reference", "ours", "none")),
        Contender(name="own", policy=Policy(migration_cooldown=60.0)),
    )


def a_tale(stuck: str) -> Tale:
    """The events of both VMs; `stuck` is the name of the VM whose evacuation is stuck."""
    tale = Tale("busy", stuck)
    tale.mark(5, stuck)
    for minutes in (1, 5, 40):
        tale.evict(minutes * MINUTE, "busy")
    return tale


def shown(result: Comparison, *, width: int | None = None) -> str:
    """The tables, without colours."""
    return comparison.show(result, width=width, colored=False)


def cells(table: str, name: str) -> list[str]:
    """The cells of the row whose first cell is `name`."""
    line = next(line for line in table.splitlines() if line.strip().startswith(name))
    return line.strip()[len(name) :].split()


def test_each_policy_has_its_column() -> None:
    """The columns are in the order of the policies."""
    table = shown(a_comparison())

    assert cells(table, "Evictions requested") == ["4", "4", "4", "4"]
    assert cells(table, "Migrations that happened") == ["2", "2", "3", "3"]
    assert cells(table, "cooling down") == ["1", "1", "0", "0"]
    assert cells(table, "Failed migrations count") == ["yes"] * 4
    assert cells(table, "Guard pendingMigrations") == ["off", "on", "off", "on"]
    assert cells(table, "Guard platformUpdate") == ["off"] * 4


def test_exceptions_are_listed() -> None:
    """The overrides of a policy are listed with their VMs and evictions."""
    entry = Override(name="gold", policy=Policy(block=True), namespaces=("shop",))
    tale = a_tale("stuck")
    own = Contender(name="own", policy=Policy(overrides=(entry,)))
    result = tale.played(3 * HOUR, BUILTIN["ours"], own)
    table = shown(result)

    assert cells(table, "block: true") == ["0", "4"]
    line = next(line for line in table.splitlines() if line.startswith("own  "))
    assert line.split() == ["own", "gold", "2", "0", "4", "shop/busy,", "shop/stuck"]
    names = ["shop/busy", "shop/stuck"]
    counts = {"vms": 2, "firstVms": names, "allowed": 0, "blocked": 4}
    told = [policy["overrides"] for policy in to_json(result)["policies"]]
    assert told == [[], [{"name": "gold", **counts}]]


def test_stuck_evacuations_are_listed() -> None:
    """Stuck evacuations are listed with VM, node, times and policies."""
    table = shown(a_comparison())
    line = next(line for line in table.splitlines() if "shop/stuck" in line)
    told = "n1 2027-01-15T08:00:05Z 35m not over no_migration, descheduler all"

    assert line.split()[1:] == told.split()


def test_the_longest_comes_first_under_any_policy() -> None:
    """The evacuation that is stuck longest under any policy is listed first."""
    tale = Tale("long", "short")
    tale.mark(1, "long")
    tale.mark(HOUR, "short")
    for minutes in (61, 62, 63):
        tale.attempt(minutes * MINUTE, "short", lasts=10, fails=True)
    patient = Contender(name="patient", stuck=StuckPolicy(after=24 * HOUR))
    table = shown(tale.played(2 * HOUR, patient, BUILTIN["ours"]))

    assert re.findall(r"^shop/(\w+)", table, re.MULTILINE) == ["long", "short"]


def test_no_name_is_markup_or_moves_the_cursor() -> None:
    """A name cannot act as markup or move the cursor."""
    table = shown(a_tale("[bold]x\x1b[2J").played(3 * HOUR))

    assert r"shop/[bold]x\x1b[2J" in table
    assert "\x1b" not in table


def test_a_narrow_terminal_cuts_no_name() -> None:
    """The list of stuck VMs is not cut at the width of the terminal."""
    wide, narrow = shown(a_comparison(), width=200), shown(a_comparison(), width=60)

    assert narrow.partition(STUCK)[2] == wide.partition(STUCK)[2]


def test_json_is_complete() -> None:
    """The JSON has every number of the table, the settings, and the timelines."""
    told = json.loads(json.dumps(to_json(a_comparison(), ["a remark"])))
    reference, ours, none, own = told["policies"]

    assert told["began"] == "2027-01-15T08:00:00Z"
    assert told["remarks"] == ["a remark"]
    assert told["vmSeconds"] == 6 * HOUR
    assert not any(reference["policy"]["guards"].values())
    assert own["policy"]["migrationCooldown"] == 60
    assert ours["evictions"] == {
        "asked": 4,
        "allowed": 3,
        "blocked": {reason: int(reason is Reason.COOLDOWN) for reason in Reason},
        "notAsked": 0,
    }
    assert none["migrations"]["perVm"]["counts"] == {"3": 1}
    assert sum(ours["overTime"]["blocked"]["bins"]) == 1
    (stuck,) = ours["stuck"]["longest"]
    assert (stuck["name"], stuck["endedAt"], stuck["stuckBy"]) == ("stuck", None, ["age"])
    assert stuck["alertedAt"] == "2027-01-15T08:35:05Z"


@pytest.mark.parametrize(("part", "whole", "share"), [(1, 4, 0.25), (0, 0, 0.0)])
def test_shares(part: float, whole: float, share: float) -> None:
    """A share of a total of 0 is 0."""
    assert comparison.share_of(part, whole) == share
