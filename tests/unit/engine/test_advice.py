"""The next step for a person, and the cluster's own words in it."""

import re
from pathlib import Path
from typing import Any

import pytest

from exporter.engine.advice import QUOTED, advise, find_cause, may_cancel
from exporter.engine.diagnosis import State
from exporter.engine.evidence import Evidence
from exporter.engine.model import Hold, Pod, Why, WhySource
from tests.support.builders import NOW, a_running_state, a_state
from tests.unit.engine.test_diagnosis import (
    CASES,
    FULL,
    SOURCE,
    a_failed_attempt,
    a_target,
    an_attempt,
    an_evacuation,
    diagnosis,
)


RUNBOOKS = Path(__file__).parents[3] / "alerts" / "runbooks"
STAYS = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable", "PVC db1 is not shared")
FULL_NODES = Why(WhySource.POD_SCHEDULED, "Unschedulable", "0/3 nodes are available", NOW - 300.0)
SELECTOR = Why(WhySource.POD_SCHEDULED, "NodeSelector", "zone=a")
PULL = Why(WhySource.TARGET_CONTAINER, "ImagePullBackOff", "no such image", NOW - 200.0)
BACKUP = Why(WhySource.MIGRATION_CONDITION, "BackupInProgress", "backup b1 is in progress", NOW)
EARLY = Why(WhySource.FAILED_ATTEMPT, "Scheduling", "after Pending 1s, Scheduling 5m", NOW)
CRASHED = Why(WhySource.TARGET_CONTAINER, "Error", "exit code 1", NOW + 1.0)
NEWER = Why(WhySource.POD_SCHEDULED, "Unschedulable", "0/3 nodes are available", NOW + 60.0)
LATE = Why(WhySource.FAILED_ATTEMPT, "Running", "qemu crashed", NOW)


@pytest.mark.parametrize("evidence", [case for _, case in CASES.values()], ids=CASES)
def test_every_state_has_a_next_step(evidence: Evidence) -> None:
    """Whatever the situation and whatever is known of it, a person is told what to do."""
    found = diagnosis(evidence)
    for why in ((), (STAYS, LATE, BACKUP, FULL_NODES, PULL), (SELECTOR,)):
        step = advise(evidence, found, why)
        assert step.endswith((".", ";"))
        assert "condition says why" not in step


@pytest.mark.parametrize(
    ("case", "why", "sentence"),
    [
        ("not-migratable", STAYS, 'cannot be migrated: "DisksNotLiveMigratable: PVC db1 is not'),
        ("unschedulable", FULL_NODES, '"Unschedulable: 0/3 nodes are available". Make room'),
        ("not-ready", PULL, 'is not running yet: "ImagePullBackOff: no such image".'),
        ("backup", BACKUP, 'is running: "BackupInProgress: backup b1 is in progress".'),
        ("backoff", LATE, 'The last cause: "Running: qemu crashed".'),
        ("nothing-begun", LATE, 'The last cause: "Running: qemu crashed".'),
    ],
)
def test_the_sentence_instead_of_its_place(case: str, why: Why, sentence: str) -> None:
    """The words that belong to the state are quoted, and not where to find them."""
    state, evidence = CASES[case]
    found = diagnosis(evidence)
    assert found.state is state
    others = (SELECTOR, STAYS)
    assert sentence in advise(evidence, found, (*others, why))


def test_a_quotation_is_short() -> None:
    """The whole text is in `why`."""
    _, evidence = CASES["not-migratable"]
    long = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable", "x" * 1024)
    step = advise(evidence, diagnosis(evidence), (long,))
    assert len(step) < QUOTED + 100
    assert "x…" in step


def test_braces_are_only_characters() -> None:
    """A text is not a template."""
    _, evidence = CASES["not-migratable"]
    odd = Why(WhySource.LIVE_MIGRATABLE, "{0}", "{x} %s {{y}}")
    assert '"{0}: {x} %s {{y}}"' in advise(evidence, diagnosis(evidence), (odd,))


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        pytest.param((), None, id="nothing"),
        pytest.param((STAYS, SELECTOR), None, id="no-attempt-failed"),
        pytest.param((EARLY, PULL, FULL_NODES), PULL, id="its-pod-said-why"),
        pytest.param((LATE, PULL, FULL_NODES), LATE, id="its-own-words"),
        pytest.param((CRASHED, LATE), LATE, id="its-pod-ended-because-of-it"),
        pytest.param((NEWER, LATE), NEWER, id="the-next-attempt-waits"),
        pytest.param((SELECTOR, EARLY), EARLY, id="its-phases-are-all-there-is"),
    ],
)
def test_the_last_cause(why: tuple[Why, ...], cause: Why | None) -> None:
    """An attempt that failed before its hand-off is explained by its target pod."""
    assert find_cause(why) is cause


def test_post_copy_is_never_to_be_aborted() -> None:
    """A stalled migration in post-copy is left alone; in pre-copy its VMIM may be deleted."""
    stalled = {"start": NOW - 10_000.0}
    for mode, word in (("PostCopy", "kills the VM"), ("PreCopy", "abort it by deleting")):
        evidence = an_evacuation(vmi={"migration": a_running_state(**stalled, mode=mode)})
        found = diagnosis(evidence)
        assert found.state is State.MIGRATION_STALLED
        assert word in advise(evidence, found)


def test_a_running_migration_has_its_mode() -> None:
    """PreCopy, PostCopy and Paused are KubeVirt's words."""
    evidence = an_evacuation(vmi={"migration": a_running_state(mode="Paused")})
    assert advise(evidence, diagnosis(evidence)) == "Wait: a migration is under way (Paused)."


FAILING = {"failed": {f"f{number}": NOW - number for number in range(14)}}


@pytest.mark.parametrize(
    ("overrides", "now"),
    [
        pytest.param(
            {"vmi": {"migration": a_running_state()}},
            "Now the next attempt is under way.",
            id="migrating",
        ),
        pytest.param(
            {"vmims": (a_failed_attempt(1, 12), an_attempt())},
            "Now KubeVirt pauses before the next attempt.",
            id="backoff",
        ),
        pytest.param(
            {"vmims": (an_attempt(),)},
            "Now the next attempt waits for its target pod.",
            id="target-not-ready",
        ),
        pytest.param({}, "Now there is no attempt;", id="no-migration"),
        pytest.param(
            {"vmims": (an_attempt(hold=Hold.QUOTA),)},
            "A ResourceQuota refuses the target pod:",
            id="what-has-a-remedy-keeps-it",
        ),
    ],
)
def test_advice_after_failures_begins_with_them(overrides: dict[str, Any], now: str) -> None:
    """How many have failed and where it says why stands first, however the state flips."""
    evidence = an_evacuation(marker=FAILING, **overrides)
    told = advise(evidence, diagnosis(evidence))

    assert told.startswith(
        "Failed attempts: at least 14. KubeVirt gives no reason: the events do, see the runbook"
        " KubeVirtEvacuationFailingRepeatedly. "
    )
    assert now in told
    known = advise(evidence, diagnosis(evidence), (EARLY, PULL))
    assert known.startswith(
        'Failed attempts: at least 14. The last cause: "ImagePullBackOff: no such image". '
    )
    assert now in known
    assert "Wait" not in told


def test_advice_after_failures_while_the_limits_are_reached() -> None:
    """Others are waited for, and that is not why the attempts before have failed."""
    evidence = an_evacuation(marker=FAILING, vmims=(an_attempt(),))
    told = advise(evidence, diagnosis(evidence, load=FULL))

    assert told.startswith("Failed attempts: at least 14.")
    assert told.endswith("waits for others: KubeVirt's migration limits are reached.")


def test_the_runbook_that_advice_names_is_there() -> None:
    """What a person is sent to exists under that name."""
    evidence = an_evacuation(marker=FAILING)
    named = re.findall(r"the runbook (\w+)", advise(evidence, diagnosis(evidence)))

    assert named
    assert all((RUNBOOKS / f"{name}.md").exists() for name in named)


def test_advice_before_too_many_failures() -> None:
    """Two failures are no reason yet to tell of them before what is so now."""
    evidence = an_evacuation(
        marker={"failed": {"f1": NOW, "f2": NOW}}, vmi={"migration": a_running_state()}
    )

    assert advise(evidence, diagnosis(evidence)) == "Wait: a migration is under way."


@pytest.mark.parametrize(
    ("pods", "place"),
    [
        pytest.param(
            (SOURCE, a_target(migration_uid="older")), "virt-launcher-db1-x on n1", id="elsewhere"
        ),
        pytest.param(
            (SOURCE, a_target(migration_uid="older", node="n1")), "on n1", id="both-on-its-node"
        ),
        pytest.param(
            (SOURCE, a_target(migration_uid="older"), a_target(node="n1", phase="Failed")),
            "virt-launcher-db1-x on n1",
            id="an-ended-one-does-not-run-it",
        ),
    ],
)
def test_advice_on_more_pods_names_the_one_that_runs_the_vm(
    pods: tuple[Pod, ...], place: str
) -> None:
    """The one not to delete is named where it can be only one, and its node always."""
    evidence = an_evacuation(pods=pods)

    assert advise(evidence, diagnosis(evidence)) == (
        "More than one launcher pod of this VM is active. Between attempts that passes by itself:"
        " wait, and delete nothing. Only if it stays so for ten minutes, delete the stale one, and"
        f" never the one that runs the VM ({place})."
    )


@pytest.mark.parametrize(
    ("state", "may"),
    [
        pytest.param(None, True, id="nothing-runs"),
        pytest.param(a_running_state(mode="PreCopy"), True, id="pre-copy"),
        pytest.param(a_running_state(mode="PostCopy"), False, id="post-copy"),
        pytest.param(a_state(mode="PostCopy"), True, id="post-copy-ended"),
    ],
)
def test_may_cancel(state: Any, may: bool) -> None:
    """A post-copy migration under way must not be ended."""
    assert may_cancel(an_evacuation(vmi={"migration": state})) is may
