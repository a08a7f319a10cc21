"""The output of `status`."""

import pytest

from exporter.cli.layout import ROWS
from exporter.counters import PreventedMoves
from exporter.engine.facts.policy import Reason
from exporter.health import Health, HistoryHealth
from tests.support.builders import (
    NOW,
    a_running_state,
)
from tests.unit.cli.answers import (
    PIPED,
    WHOLE,
    held,
    status_of,
    stuck,
)
from tests.unit.engine.evacuations.test_diagnosis import an_attempt, an_evacuation
from tests.unit.server.api.test_answers import some_health


TRUST = {
    "fresh": (some_health(), NOW, "Healthy: ready, all resources visible, last contact 2s ago."),
    "blind": (
        some_health(synced=False, rejected="forbidden"),
        NOW,
        (
            "Mostly healthy: the exporter may not read virtualmachineinstancemigrations; last"
            " contact 2s ago."
        ),
    ),
    "stale": (
        some_health(),
        NOW + 200.0,
        "Stale: last contact 3m22s ago; answers may be out of date.",
    ),
    "dead": (
        some_health(),
        NOW + 2000.0,
        "Dead: last contact 33m22s ago; only cooldowns still block VMs.",
    ),
    "not-ready": (
        some_health(synced=False),
        NOW,
        (
            "Not ready: the exporter is waiting for virtualmachineinstancemigrations, and gives no"
            " verdicts."
        ),
    ),
}


@pytest.mark.parametrize(
    ("health", "now", "sentence"),
    TRUST.values(),
    ids=TRUST,
)
def test_the_first_sentence_says_whether_to_believe_it(
    health: Health, now: float, sentence: str
) -> None:
    """The first sentence says whether the exporter is ready and up to date."""
    assert status_of(health=health, now=now).splitlines()[0] == sentence


def test_a_status_is_shown() -> None:
    """`status` shows the exporter's health, VMs by reason, evacuations, and releases in order."""
    health = some_health(trouble="watch broke: reset by peer", invalid_objects=2)
    health.history = HistoryHealth(written_at=NOW - 9.0, vmis=3, trouble="the disk is full")
    blocked = (
        held("a", until=NOW + 600.0),
        held("b", Reason.MIGRATION_IN_PROGRESS),
        held("c", until=NOW + 60.5),
    )
    prevented = PreventedMoves()
    prevented.moves.update(shop=2, bank=1)
    prevented.migration_seconds.update(shop=480.0, bank=30.0)
    text = status_of(
        an_evacuation(vmi={"name": "web1"}, vmims=(an_attempt(phase="Running"),)),
        stuck(name="web2"),
        blocked=blocked,
        health=health,
        prevented=prevented,
    )

    assert (
        text
        == """\
Healthy: ready, all resources visible, last contact 2s ago.
Warning: virtualmachineinstancemigrations: watch broke: reset by peer.
Warning: virtualmachineinstancemigrations: 2 objects could not be read.
Warning: the history file is not written: the disk is full.

Based on
  version                           0.1.0
  history                           a file with 3 VMs, written 9s ago
  virtualmachineinstances           synced, last contact 2s ago
  virtualmachineinstancemigrations  synced, last contact 2s ago
  pods                              synced, last contact 2s ago
  kubevirts                         synced, last contact 2s ago
  nodes                             synced, last contact 2s ago
  poddisruptionbudgets              synced, last contact 2s ago

VMs: 100
  no rule blocks                  97
  blocked: migration_in_progress  1
  blocked: cooldown               2
  if their nodes were drained  stays 2, leaves 98
  moves prevented by cooldowns  3 since the start 2h ago, about 8m30s of migration

Stuck evacuations: 1
  VM         FROM  AGE  STATE  FAILED
  shop/web2  n1    2h   quota  1
  shop/web2:  Raise the ResourceQuota of the namespace: it refuses the target pod.
  runbook: KubeVirtEvacuationStuck#quota
    kubectl -n shop describe resourcequotas

Other evacuations: 1
  VM         FROM  AGE  STATE      FAILED
  shop/web1  n1    1m   migrating  0
  shop/web1:  Wait: KubeVirt is moving the VM.

Blocked VMs: 3
  VM      ON  BECAUSE                UNTIL
  shop/c  n1  cooldown               2027-01-15T08:01:01Z (in 1m1s)
  shop/a  n1  cooldown               2027-01-15T08:10:00Z (in 10m)
  shop/b  n1  migration_in_progress  the migration ends
"""
    )


def test_without_prevented_moves_no_time_is_told() -> None:
    """Before anybody asked for a VM within its cooldown, only the 0 is shown."""
    assert "  moves prevented by cooldowns  0 since the start 2h ago\n" in status_of()


def test_what_to_do_is_told_of_each_that_differs() -> None:
    """Each next step is shown once, with the VMs to which it applies."""
    failing = {"failed": {f"f{number}": NOW - number for number in range(14)}}
    first, second, third = (
        an_evacuation(vmi={"name": name, "migration": a_running_state()}, marker=marker)
        for name, marker in (("web1", {}), ("web2", {}), ("web3", failing))
    )
    text = status_of(third, first, second, screen=WHOLE)

    assert text.count("  shop/web1 and 1 more:  Wait: KubeVirt is moving the VM.\n") == 1
    assert text.count("  shop/web3:  Read the events of the VMIM and of its pod, ") == 1


def test_a_vm_blocked_twice_is_one_row() -> None:
    """A VM that is blocked at both checkpoints has one row with both reasons."""
    blocked = (held("a", Reason.MIGRATION_IN_PROGRESS), held("a", until=NOW + 600.0))

    assert "  shop/a  n1  migration_in_progress, cooldown  the migration ends\n" in status_of(
        blocked=blocked
    )


def test_nothing_more_is_shown_before_it_is_ready() -> None:
    """Before the exporter is ready, only its health is shown."""
    text = status_of(health=some_health(synced=False))

    assert "\n  virtualmachineinstancemigrations  not listed yet\n" in text
    assert "VMs:" not in text
    assert "vacuations" not in text


def test_lists_are_bounded_unless_all_is_asked_for() -> None:
    """Lists have twenty rows and the number of hidden rows; `--all` shows all rows."""
    blocked = tuple(held(f"vm-{n:03}", until=NOW + 60.0 * n) for n in range(1, 51))
    cut, whole = (status_of(blocked=blocked, screen=screen) for screen in (PIPED, WHOLE))

    assert (cut.count("shop/vm-"), whole.count("shop/vm-")) == (ROWS, 50)
    assert "\n  and 30 more: --all shows them\n" in cut
    assert "--all" not in whole


def test_a_history_file_that_is_not_written_yet() -> None:
    """A file that was not written since the start is shown as such."""
    health = some_health()
    health.history = HistoryHealth()
    assert "a file, not written since the start\n" in status_of(health=health)
