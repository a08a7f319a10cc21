"""What people read: sentences, aligned columns, and nothing that a name can break."""

import fcntl
import io
import json
import os
import re
import struct
import subprocess
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from exporter.cli.terminal import (
    ROWS,
    Screen,
    Unreadable,
    look_at,
    show_status,
    show_vmi,
    write_arithmetic,
    write_cancel,
)
from exporter.counters import HeldEviction
from exporter.engine.evidence import Evidence
from exporter.engine.model import Checkpoint, Hold, Reason, StuckPolicy
from exporter.health import CheckpointFault, CheckpointHealth, Health
from exporter.server.answers import describe_status, list_evacuations
from exporter.server.schemas import (
    BlockedAnswer,
    BlockedVmi,
    CancelAnswer,
    write_instant,
    write_optional_instant,
)
from exporter.text import escape
from tests.support.builders import (
    NOW,
    a_history,
    a_migration,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    some_evidence,
)
from tests.unit.engine.test_diagnosis import a_failed_attempt, an_attempt, an_evacuation
from tests.unit.server.test_answers import explained, some_health


PIPED = Screen()
NARROW = Screen(width=80)
COLORED = Screen(width=80, colored=True)
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def cooling() -> Evidence:
    """A VM that was moved twice; the second migration took 3m12s and ended ten minutes ago."""
    return some_evidence(
        vmi=a_vmi(migration=a_state(uid="m2", start=NOW - 792.0)),
        history=a_history(
            m1=a_migration(start=NOW - 4000.0, end=NOW - 3900.0),
            m2=a_migration(start=NOW - 792.0),
        ),
    )


def stuck(**vmi: Any) -> Evidence:
    """A VM whose evacuation was asked for two hours ago, and which a quota holds."""
    return an_evacuation(
        age=7200.0,
        vmims=(an_attempt(hold=Hold.QUOTA),),
        vmi=vmi,
        marker={"failed": {"f1": NOW - 900.0}},
    )


def held(name: str, reason: Reason = Reason.COOLDOWN, until: float | None = None) -> BlockedVmi:
    """A VM of the blocked set."""
    cools = reason is Reason.COOLDOWN
    return BlockedVmi(
        namespace="shop",
        name=name,
        vmi_uid=name,
        node="n1",
        checkpoint=Checkpoint.PRE_EVICTION if cools else Checkpoint.FILTER,
        reason=reason,
        not_before=write_optional_instant(until),
    )


def status_of(
    *evacuating: Evidence,
    blocked: tuple[BlockedVmi, ...] = (),
    health: Health | None = None,
    screen: Screen = PIPED,
    everything: bool = False,
    now: float = NOW,
) -> str:
    """What `status` shows of these."""
    health = health or some_health()
    status = describe_status(health, vmis=100, blocked=blocked, now=now)
    evacuations = list_evacuations(evacuating, StuckPolicy(), None, now, health)
    answer = BlockedAnswer(
        as_of=write_instant(now), stale=False, max_age_seconds=90.0, blocked=list(blocked)
    )
    ready = status.ready
    return show_status(
        status,
        evacuations if ready else None,
        answer if ready else None,
        screen,
        everything=everything,
    )


def test_a_vm_that_cools_down_is_explained() -> None:
    """First one sentence; then each rule, the arithmetic, the migrations, what it rests on."""
    assert show_vmi(explained(cooling()), PIPED) == (
        """\
shop/db1 may not be moved now: it cools down after its last migration, until \
2027-01-15T08:20:00Z (in 20m).

Rules, in the order in which they are asked
  running_migration     lets it go  the last migration has ended: endTimestamp is \
2027-01-15T07:50:00Z (filter)
  pending_migration     lets it go  no unfinished VMIM belongs to this VMI (filter)
  requested_evacuation  lets it go  evacuationNodeName is not set (filter)
  cooldown              holds it    2 ended in the window: base 15m, backed off to 30m, from \
2027-01-15T07:50:00Z on (preEviction)

Cooldown
  arithmetic      max(15m, 3m12s) x 2^(2-1) = 30m, cap 6h
  last migration  ended 2027-01-15T07:50:00Z (10m ago), took 3m12s
  until           2027-01-15T08:20:00Z (in 20m)

Migrations on record: 2, 2 of them counted
  ENDED                            TOOK   OUTCOME    COUNTED
  2027-01-15T06:55:00Z (1h5m ago)  1m40s  succeeded  yes
  2027-01-15T07:50:00Z (10m ago)   3m12s  succeeded  yes

What this rests on
  runs on              n1
  launcher pod         virt-launcher-db1-x: Running, ready
  heard of API server  2027-01-15T07:59:58Z (2s ago)
  not seen             nothing is hidden
"""
    )


def test_who_asked_for_its_eviction() -> None:
    """Each user whose eviction was held, how often, when last, and whether it was denied."""
    vmi = explained(
        cooling(),
        held_evictions=(
            HeldEviction("descheduler", NOW - 7.0, Reason.COOLDOWN, denied=True, times=3),
            HeldEviction("autoscaler", NOW - 70.0, Reason.COOLDOWN, denied=False),
        ),
    )
    told = show_vmi(vmi, PIPED).partition("Evictions asked for\n")[2].splitlines()[:2]
    assert [re.sub(" +", " ", line) for line in told] == [
        " by descheduler 3 times, last 2027-01-15T07:59:53Z (7s ago) denied cooldown",
        " by autoscaler once 2027-01-15T07:58:50Z (1m10s ago) would be denied cooldown",
    ]


@pytest.mark.parametrize(
    ("evidence", "sentence"),
    [
        pytest.param(
            some_evidence(),
            "shop/db1 may be moved now: no rule holds it, and no migration of it is on record to"
            " cool down from.",
            id="never-moved",
        ),
        pytest.param(
            some_evidence(vmi=a_vmi(migration=a_state(start=NOW - 7260.0, end=NOW - 7200.0))),
            "shop/db1 may be moved now: no rule holds it, and its last cooldown ended 1h45m ago.",
            id="cooled-down",
        ),
        pytest.param(
            some_evidence(vmi=a_vmi(migration=a_running_state())),
            "shop/db1 may not be moved now: a migration of it is under way, and that has to end"
            " first.",
            id="migrating",
        ),
        pytest.param(
            some_evidence(vmi=a_vmi(phase="Failed", migration=a_running_state())),
            "shop/db1 has ended (Failed): there is nothing to move.",
            id="ended",
        ),
        pytest.param(
            an_evacuation(launcher=None),
            "shop/db1 is being evacuated from n1 already, and no rule holds it.",
            id="evacuated-unseen",
        ),
    ],
)
def test_the_first_sentence_answers(evidence: Evidence, sentence: str) -> None:
    """Whether it may be moved now; if not why, and until when."""
    assert show_vmi(explained(evidence), PIPED).splitlines()[0] == sentence


def test_a_stuck_evacuation_is_explained() -> None:
    """Its state, attempts, next step, and the command that cancels it on a line of its own."""
    text = show_vmi(explained(stuck()), PIPED)

    assert text.splitlines()[1] == (
        "Its evacuation is stuck. A ResourceQuota refuses the target pod: raise it, or cancel the"
        " evacuation."
    )
    assert (
        """
Evacuation from n1
  state            quota: stuck by age
  requested        2027-01-15T06:00:00Z (2h ago), source unknown
  failed attempts  at least 1
  attempt now      kubevirt-evacuation-1: Pending, made 2027-01-15T07:59:50Z (10s ago)
  next step        A ResourceQuota refuses the target pod: raise it, or cancel the evacuation.
  to cancel it (KubeVirt 1.8), run
    echo '{"evacuationNodeName":"n1"}' | kubectl replace --raw /apis/subresources.kubevirt.io/v1"""
        "/namespaces/shop/virtualmachineinstances/db1/evacuate/cancel -f -\n"
    ) in text


def test_a_pause_and_a_divergence_are_told() -> None:
    """KubeVirt's pause with its end, and that the descheduler believes it over."""
    pausing = an_evacuation(
        age=7200.0,
        vmims=(an_attempt(), a_failed_attempt(1, 5.0)),
        marker={"lacking_since": NOW - 600.0},
        pods=(a_pod(),),
    )
    text = show_vmi(explained(pausing), PIPED)

    assert "  KubeVirt pauses  20s, next try in 15s\n" in text
    assert "  diverged         the descheduler believes it over, KubeVirt does not\n" in text


def test_no_command_where_cancelling_could_harm() -> None:
    """In post-copy there is none to copy."""
    state = a_running_state(mode="PostCopy")
    text = show_vmi(explained(stuck(migration=state)), PIPED)

    assert "Evacuation from n1" in text
    assert "kubectl" not in text


def test_doubts_come_right_after_the_sentence() -> None:
    """Stale evidence and blind spots are warned of before anything is concluded from them."""
    health = some_health(synced=False, refused="forbidden by RBAC")
    text = show_vmi(explained(cooling(), now=NOW + 400.0, health=health), PIPED)
    first, second, third, *_ = text.splitlines()

    assert "may not be moved now" in first
    assert second == (
        "Warning: nothing was heard of the API server since 2027-01-15T07:59:58Z (6m42s ago): this"
        " may be out of date."
    )
    assert third == (
        "Warning: virtualmachineinstancemigrations may not be seen: forbidden by RBAC."
    )


def test_rules_that_are_off_or_silent_are_told() -> None:
    """Neither is taken for one that lets it go."""
    off = explained(cooling(), policy=a_policy(guard_evacuations=False))
    dead = explained(cooling(), now=NOW + 3000.0)

    assert "\n  requested_evacuation  is off      " in show_vmi(off, PIPED)
    assert "\n  running_migration     is silent   " in show_vmi(dead, PIPED)


@pytest.mark.parametrize(
    ("ended", "outcome", "row"),
    [
        pytest.param(
            {"handed_off": False}, "succeeded", "no: never handed off", id="not-handed-off"
        ),
        pytest.param({"end": NOW - 100_000.0}, "succeeded", "no", id="left-the-window"),
        pytest.param({"end": None}, "succeeded", "no", id="no-end"),
    ],
)
def test_migrations_that_do_not_count_are_told(
    ended: Mapping[str, Any], outcome: str, row: str
) -> None:
    """With why, where it is not their age."""
    evidence = some_evidence(history=a_history(m1=a_migration(**ended)))
    text = show_vmi(explained(evidence), PIPED)

    assert "Migrations on record: 1, 0 of them counted" in text
    assert re.search(rf"  {outcome}  {row}$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("policy", "took", "ends", "written"),
    [
        pytest.param({}, 192.0, 2, "max(15m, 3m12s) x 2^(2-1) = 30m, cap 6h", id="doubled"),
        pytest.param({}, 1800.0, 1, "max(15m, 30m) x 2^(1-1) = 30m, cap 6h", id="slow"),
        pytest.param({}, 60.0, 7, "max(15m, 1m) x 2^(7-1) = 16h, capped at 6h", id="capped"),
        pytest.param(
            {"max_migration_cooldown": 0.0},
            60.0,
            7,
            "max(15m, 1m) x 2^(7-1) = 16h, no cap",
            id="no-cap",
        ),
        pytest.param(
            {"migration_cooldown": 0.0}, 60.0, 2, "1m (no floor) x 2^(2-1) = 2m, cap 6h", id="floor"
        ),
        pytest.param(
            {"migration_history_window": 0.0}, 60.0, 2, "max(15m, 1m) = 15m, cap 6h", id="backoff"
        ),
    ],
)
def test_the_arithmetic_is_as_one_writes_it(
    policy: Mapping[str, Any], took: float, ends: int, written: str
) -> None:
    """Floor, duration, doubling and cap, each of them off where the policy switches it off."""
    last = a_migration(start=NOW - 600.0 - took, end=NOW - 600.0)
    older = {f"m{n}": a_migration(end=NOW - 700.0 - n - took) for n in range(1, ends)}
    evidence = some_evidence(
        vmi=a_vmi(migration=a_state(uid="m0", start=NOW - 600.0 - took)),
        history=a_history(m0=last, **older),
    )
    answer = explained(evidence, policy=a_policy(**policy))

    assert answer.cooldown is not None
    assert write_arithmetic(answer.cooldown, answer.policy) == written


def test_a_release_is_never_told_too_early() -> None:
    """A fraction of a second is rounded up, in the instant and in how far it is."""
    state = a_state(start=NOW - 660.0, end=NOW - 600.0)
    answer = explained(some_evidence(vmi=a_vmi(migration=state)))
    answer.verdicts.pre_eviction.not_before = "2027-01-15T08:00:01.500000Z"

    assert "until 2027-01-15T08:00:02Z (in 2s)." in show_vmi(answer, PIPED)


@pytest.mark.parametrize(
    ("health", "now", "sentence"),
    [
        pytest.param(
            some_health(),
            NOW,
            "To be trusted: ready, nothing hidden, heard of the API server 2s ago.",
            id="fresh",
        ),
        pytest.param(
            some_health(synced=False, refused="forbidden"),
            NOW,
            "To be trusted, with blind spots: ready, heard of the API server 2s ago.",
            id="blind",
        ),
        pytest.param(
            some_health(),
            NOW + 200.0,
            "Stale: last heard of the API server 3m22s ago; what it tells may have changed.",
            id="stale",
        ),
        pytest.param(
            some_health(),
            NOW + 2000.0,
            "Dead: last heard of the API server 33m22s ago; only cooldowns still hold VMs.",
            id="dead",
        ),
        pytest.param(
            some_health(synced=False),
            NOW,
            "Not ready: the exporter waits for virtualmachineinstancemigrations, and answers no"
            " verdicts.",
            id="not-ready",
        ),
    ],
)
def test_the_first_sentence_says_whether_to_believe_it(
    health: Health, now: float, sentence: str
) -> None:
    """Ready, fresh, and nothing hidden; or what is wrong."""
    assert status_of(health=health, now=now).splitlines()[0] == sentence


def test_a_status_is_shown() -> None:
    """Trust first; then VMs by reason, stuck evacuations before others, releases in order."""
    health = some_health(trouble="watch broke: reset by peer", refused_objects=2)
    health.checkpoint = CheckpointHealth(
        may_write=lambda: True, written_at=NOW - 9.0, vmis=3, size=1234
    )
    health.checkpoint.faults[CheckpointFault.DAMAGED] = 1
    blocked = (
        held("a", until=NOW + 600.0),
        held("b", Reason.MIGRATION_IN_PROGRESS),
        held("c", until=NOW + 60.5),
    )
    text = status_of(
        an_evacuation(vmi={"name": "web1"}, vmims=(an_attempt(phase="Running"),)),
        stuck(name="web2"),
        blocked=blocked,
        health=health,
    )

    assert (
        text
        == """\
To be trusted: ready, nothing hidden, heard of the API server 2s ago.
Warning: virtualmachineinstancemigrations: watch broke: reset by peer.
Warning: virtualmachineinstancemigrations: 2 objects could not be read.
Warning: checkpoint: 1 x damaged since the start.

What it rests on
  version                           0.1.0
  checkpoint                        3 VMs, 1,234 bytes, written by this process, as it should be \
9s ago
  virtualmachineinstances           synced, heard 2s ago
  virtualmachineinstancemigrations  synced, heard 2s ago
  pods                              synced, heard 2s ago
  kubevirts                         synced, heard 2s ago

VMs: 100
  may be moved now             97
  held: migration_in_progress  1
  held: cooldown               2

Stuck evacuations: 1
  VM         FROM  AGE  STATE  FAILED
  shop/web2  n1    2h   quota  1
  quota:  A ResourceQuota refuses the target pod: raise it, or cancel the evacuation.

Other evacuations: 1
  VM         FROM  AGE  STATE      FAILED
  shop/web1  n1    1m   migrating  0
  migrating:  Wait: a migration is under way.

Held VMs: 3
  VM      ON  BECAUSE                UNTIL
  shop/c  n1  cooldown               2027-01-15T08:01:01Z (in 1m1s)
  shop/a  n1  cooldown               2027-01-15T08:10:00Z (in 10m)
  shop/b  n1  migration_in_progress  that has ended
"""
    )


def test_what_to_do_is_told_of_each_that_differs() -> None:
    """Two VMs in one state with different steps have a line each, two with the same share one."""
    failing = {"failed": {f"f{number}": NOW - number for number in range(14)}}
    first, second, third = (
        an_evacuation(vmi={"name": name, "migration": a_running_state()}, marker=marker)
        for name, marker in (("web1", {}), ("web2", {}), ("web3", failing))
    )
    text = status_of(first, second, third, everything=True)

    assert text.count("  migrating:  Wait: a migration is under way.\n") == 1
    assert text.count("  migrating:  Failed attempts: at least 14. ") == 1


def test_a_vm_held_twice_is_one_row() -> None:
    """With both reasons: its cooldown's end alone would not release it."""
    blocked = (held("a", Reason.MIGRATION_IN_PROGRESS), held("a", until=NOW + 600.0))

    assert "  shop/a  n1  migration_in_progress, cooldown  that has ended\n" in status_of(
        blocked=blocked
    )


def test_nothing_more_is_shown_before_it_is_ready() -> None:
    """No list is empty because nobody could be asked yet."""
    text = status_of(health=some_health(synced=False))

    assert "\n  virtualmachineinstancemigrations  not listed yet\n" in text
    assert "VMs:" not in text
    assert "vacuations" not in text


def test_lists_are_bounded_unless_all_is_asked_for() -> None:
    """Twenty rows and how many more there are; `--all` shows them."""
    blocked = tuple(held(f"vm-{n:03}", until=NOW + 60.0 * n) for n in range(1, 51))
    cut, whole = (status_of(blocked=blocked, everything=everything) for everything in (False, True))

    assert (cut.count("shop/vm-"), whole.count("shop/vm-")) == (ROWS, 50)
    assert "\n  and 30 more: --all shows them\n" in cut
    assert "--all" not in whole


def test_a_checkpoint_of_another_replica_and_what_waits_are_told() -> None:
    """Who writes it, and since when something is not written."""
    health = some_health()
    health.checkpoint = CheckpointHealth(find_unwritten=lambda: NOW - 60.0, vmis=3, size=99)

    assert (
        "3 VMs, 99 bytes, written by another replica, changes unwritten since"
        " 2027-01-15T07:59:00Z (1m ago)\n"
    ) in status_of(health=health)


@pytest.mark.parametrize("screen", [NARROW, COLORED], ids=["plain", "colored"])
def test_nothing_is_wider_than_the_terminal(screen: Screen) -> None:
    """At 80 columns every line fits, long names too; only a command to copy is never broken."""
    long = {"namespace": "a" * 63, "name": "b" * 253, "node": "n" * 63}
    evidence = stuck(**long, evacuation_node="n" * 63)
    texts = [
        show_vmi(explained(evidence), screen),
        show_vmi(explained(cooling()), screen),
        status_of(evidence, stuck(), blocked=(held("c" * 253, until=NOW + 60.0),), screen=screen),
    ]

    for line in COLORS.sub("", "".join(texts)).splitlines():
        assert cell_len(line) <= 80 or line.startswith("    echo "), line


def test_long_cells_go_on_below_their_beginning() -> None:
    """A sentence in a table's last column is broken between words, under itself."""
    text = show_vmi(explained(cooling()), NARROW)

    assert (
        """
  cooldown              holds it    2 ended in the window: base 15m, backed off
                                    to 30m, from 2027-01-15T07:50:00Z on
                                    (preEviction)
"""
        in text
    )


def test_a_pipe_gets_a_line_each() -> None:
    """Piped, nothing is wrapped, coloured or padded: a line can be grepped for."""
    texts = (show_vmi(explained(stuck(name="b" * 253)), PIPED), status_of(stuck()))
    for text in texts:
        assert text.replace("\n", "").isprintable()
        assert not re.search(r" +$", text, re.MULTILINE)
    (line,) = (line for line in texts[1].splitlines() if "shop/db1" in line)
    assert line.split() == ["shop/db1", "n1", "2h", "quota", "1"]


def test_colours_say_no_more_than_the_words() -> None:
    """Without its colours the text is the same; with them there are some."""
    answer = explained(stuck())
    colored = show_vmi(answer, COLORED)

    assert "\x1b[" in colored
    plain = COLORS.sub("", colored)
    assert [line.rstrip() for line in plain.splitlines()] == show_vmi(answer, NARROW).splitlines()


@given(
    name=st.text(min_size=1, max_size=40) | st.sampled_from(["[bold]x[/bold]", "[/]", ":smile:"])
)
def test_a_name_is_only_text(name: str) -> None:
    """Whatever a name holds, control characters, markup or emoji codes, it is shown and no more."""
    evidence = stuck(namespace="shop", name=name, node=name, evacuation_node=name)
    for screen in (PIPED, COLORED):
        text = show_vmi(explained(evidence), screen) + status_of(evidence, screen=screen)
        assert all(c == "\n" or c.isprintable() for c in COLORS.sub("", text)), text
    assert f"shop/{escape(name)} may" in show_vmi(explained(evidence), PIPED)


def test_the_cancel_command_is_run_by_a_shell(tmp_path: Path) -> None:
    """A shell hands kubectl the very path and body, whatever is in them."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done; cat\n')
    kubectl.chmod(0o755)
    cancel = CancelAnswer(
        method="PUT", path="/apis/it's/$HOME", body={"evacuationNodeName": "n'1 $(id)"}
    )
    done = subprocess.run(
        ["sh", "-c", write_cancel(cancel)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    *arguments, body = done.stdout.splitlines()

    assert arguments == ["replace", "--raw", "/apis/it's/$HOME", "-f", "-"]
    assert json.loads(body) == cancel.body


@pytest.mark.parametrize("instant", ["", "soon", "2027-01-15T08:00:00"])
def test_what_is_no_instant_is_told(instant: str) -> None:
    """An exporter of another version may say anything."""
    answer = explained(cooling())
    answer.as_of = instant
    with pytest.raises(Unreadable, match=f"'{instant}' is no instant"):
        show_vmi(answer, PIPED)


def test_no_command_is_made_of_a_method_that_kubectl_has_no_verb_for() -> None:
    """It would be pasted into a shell."""
    with pytest.raises(Unreadable, match="'BREW'"):
        write_cancel(CancelAnswer(method="BREW", path="/", body={}))


def test_the_last_instant_is_told() -> None:
    """Where there is no next second."""
    answer = explained(cooling())
    answer.verdicts.pre_eviction.not_before = "9999-12-31T23:59:59.999999Z"

    assert "until 9999-12-31T23:59:59Z" in show_vmi(answer, PIPED)


@pytest.mark.parametrize(
    ("environment", "columns", "screen"),
    [
        pytest.param({"TERM": "xterm"}, 100, Screen(100, colored=True), id="terminal"),
        pytest.param({"TERM": "xterm", "NO_COLOR": "1"}, 100, Screen(100), id="no-color"),
        pytest.param({"TERM": "xterm", "NO_COLOR": ""}, 100, Screen(100, colored=True), id="unset"),
        pytest.param({"TERM": "dumb"}, 100, Screen(100), id="dumb"),
        pytest.param({}, 100, Screen(100), id="no-term"),
        pytest.param({"TERM": "xterm"}, 0, Screen(80, colored=True), id="unknown-width"),
        pytest.param({"TERM": "xterm"}, 7, Screen(40, colored=True), id="tiny"),
    ],
)
def test_a_terminal_is_looked_at(
    environment: Mapping[str, str], columns: int, screen: Screen
) -> None:
    """Its width, and whether it wants colours."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal:
        assert look_at(terminal, environment) == screen


def test_a_terminal_that_does_not_know_its_width() -> None:
    """Eighty columns, as long ago."""

    class Unsized(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            raise OSError

    assert look_at(Unsized(), {"TERM": "xterm"}) == COLORED


def test_a_pipe_is_no_terminal() -> None:
    """Neither width nor colours, whatever the environment says."""
    assert look_at(io.StringIO(), {"TERM": "xterm"}) == PIPED
