"""The simulated virt-controller and virt-api follow KubeVirt's rules."""

from __future__ import annotations

from datetime import datetime

import pytest

from exporter.demo import controller, node, objects
from exporter.demo.controller import MigrationView, Rules

from .facts import NOW, RULES, Play, at, evict, make_evacuation, make_pod, make_vmi, through


OLD = {"migrationUid": "m0", "endTimestamp": "2026-08-22T09:00:00Z", "completed": True}
OLD |= {"startTimestamp": "2026-08-22T08:00:00Z"}


@pytest.fixture
def play() -> Play:
    """An evacuation that was just requested."""
    return Play()


class TestPhases:
    """The phases of a VMIM."""

    def test_another_unfinished_migration_fails_a_new_one(self, play: Play) -> None:
        """A new VMIM fails if the VMI has another unfinished migration."""
        play.hand_off()
        second = make_evacuation(play.vmi, "m2", created=1)
        seen = MigrationView(second, play.vmi, play.pods, [play.migration, second])

        failed = controller.reconcile_migration(seen, at(20), RULES).migration

        assert objects.phase(failed or {}) == "Failed"

    @pytest.mark.parametrize("kind", ["HotVCPUChange", "HotMemoryChange"])
    def test_a_migration_is_not_finished_before_its_hotplug(self, play: Play, kind: str) -> None:
        """A VMIM stays Running after the end of its migration until the hotplug is over."""
        play.hand_off()
        play.prepare()
        play.reconcile()
        play.start()
        play.reconcile()
        play.vmi["status"]["migrationState"] |= {"endTimestamp": "x", "completed": True}
        objects.set_condition(play.vmi, {"type": kind, "status": "True"})
        play.reconcile(2)
        before = objects.phase(play.migration)
        objects.drop_condition(play.vmi, kind)
        play.reconcile()

        assert (before, objects.phase(play.migration)) == ("Running", "Succeeded")

    def test_migrations_of_a_vanished_vmi_are_deleted(self) -> None:
        """A VMIM whose VMI is gone is deleted, and then loses its finalizer."""
        migration = through(make_evacuation(make_vmi()), "Pending")
        deletion = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        marked = objects.changed(migration, lambda made: made["metadata"].update(deletion))

        first = controller.reconcile_migration(MigrationView(migration, None), NOW, RULES)
        second = controller.reconcile_migration(MigrationView(marked, None), NOW, RULES)

        assert first.delete_migrations == [migration]
        assert second.migration is not None
        assert "finalizers" not in second.migration["metadata"]


class TestHandOff:
    """The VMI's `migrationState` over time."""

    def test_before_it_the_old_data_stays(self, play: Play) -> None:
        """In Pending and Scheduling the VMI still has the state of the earlier migration."""
        play.vmi["status"]["migrationState"] = OLD
        play.reconcile(4)

        assert play.phases == ["Pending", "Scheduling"]
        assert play.state == OLD


class TestFailures:
    """The state after each kind of failure."""

    def test_an_unschedulable_target_fails_after_300_seconds(self, play: Play) -> None:
        """After 300 s an unschedulable target pod is deleted, and the VMIM fails."""
        play.reconcile(3)
        play.pods[1] = node.leave_unscheduled(play.pods[1], 4, play.now)
        before = play.vmi
        waiting = play.reconcile()
        play.now = at(301)
        play.reconcile(2)

        assert waiting.requeue_at == at(301)
        assert play.phases == ["Pending", "Scheduling", "Failed"]
        assert play.vmi == before
        assert play.migration["status"]["migrationState"] == {
            "sourcePod": "virt-launcher-db1-aaaaa"
        }

    def test_a_target_lost_before_the_start_starts_and_ends_at_once(self, play: Play) -> None:
        """If the target pod fails before the migration starts, start and end have the same time."""
        play.hand_off()
        play.reconcile()
        play.lose_target()
        play.reconcile(2)

        assert play.state["startTimestamp"] == play.state["endTimestamp"]
        assert play.state["completed"] is True
        assert play.state["failed"] is True
        assert objects.phase(play.migration) == "Failed"
        assert play.vmi["status"]["evacuationNodeName"] == "n1"

    def test_a_target_lost_once_ready_is_a_zombie_where_the_bug_is(self) -> None:
        """If a ready target pod fails, the state gets an end; with bug #18087 it gets none."""
        for leaves_zombies in (True, False):
            play = Play(leaves_zombies=leaves_zombies)
            play.hand_off()
            play.prepare()
            play.reconcile()
            play.lose_target()
            play.reconcile(3)

            assert objects.phase(play.migration) == "Failed"
            assert ("endTimestamp" not in play.state) is leaves_zombies
            assert ("startTimestamp" not in play.state) is leaves_zombies

    def test_a_migration_taken_over_fails(self, play: Play) -> None:
        """After its hand-off a VMIM fails if the VMI's state belongs to another migration."""
        play.hand_off()
        play.reconcile()
        play.vmi["status"]["migrationState"] = {"migrationUid": "m7"}
        play.reconcile()

        assert objects.phase(play.migration) == "Failed"


def backoff(older: list[objects.Object], rules: Rules = RULES) -> datetime | None:
    """The end of the backoff of a new evacuation after these migrations."""
    newest = make_evacuation(evict(make_vmi(), make_pod(make_vmi())), "new", created=1000)
    return controller.backoff_until(newest, [*older, newest], rules)


class TestBackoff:
    """How long a retried evacuation stays Pending."""

    @staticmethod
    def failures(count: int) -> list[objects.Object]:
        """Failed evacuations, ten seconds apart. Each failed two seconds after its creation."""
        vmi = evict(make_vmi(), make_pod(make_vmi()))
        return [
            through(
                make_evacuation(vmi, f"m{number}", created=10 * number),
                *("Pending", "Scheduling", "Failed"),
                start=10 * number,
            )
            for number in range(count)
        ]

    @pytest.mark.parametrize(("failed", "seconds"), [(1, 20), (2, 40), (3, 80), (4, 160), (5, 320)])
    def test_it_doubles_from_20_seconds(self, failed: int, seconds: int) -> None:
        """The backoff is 20 s after one failure, and doubles up to 320 s after five."""
        assert backoff(self.failures(failed)) == at(10 * (failed - 1) + 2 + seconds)

    def test_a_success_ends_the_count(self) -> None:
        """Failures before the last success do not count."""
        older = self.failures(3)
        older[1] = through(make_evacuation(make_vmi(), "m1", created=10), "Pending", "Succeeded")

        assert backoff(older) == at(22 + 20)

    def test_deleted_failures_are_skipped(self) -> None:
        """A failure that is being deleted does not count."""
        older = self.failures(3)
        older[1]["metadata"]["deletionTimestamp"] = "2026-08-22T10:00:30Z"

        assert backoff(older) == at(22 + 40)

    def test_migrations_asked_for_by_hand_neither_wait_nor_count(self) -> None:
        """A migration that a user created neither waits nor counts."""
        older = self.failures(2)
        by_hand = make_evacuation(make_vmi(), "hand", created=500)
        del by_hand["metadata"]["annotations"][objects.EVACUATION]
        by_hand = through(by_hand, "Pending", "Failed", start=500)

        assert controller.backoff_until(by_hand, [*older, by_hand], RULES) is None
        assert backoff([*older, by_hand]) == at(12 + 40)

    def test_a_waiting_migration_creates_no_pod(self, play: Play) -> None:
        """The target pod is created only after the backoff."""
        (failed,) = self.failures(1)
        play.migration = make_evacuation(play.vmi, "new", created=5)
        play.migration = through(play.migration, "Pending", start=5)
        seen = MigrationView(play.migration, play.vmi, play.pods, [failed, play.migration])

        early = controller.reconcile_migration(seen, at(21), RULES)
        late = controller.reconcile_migration(seen, at(22), RULES)

        assert early.create_pod is None
        assert early.requeue_at == at(22)
        assert late.create_pod is not None


class TestWaiting:
    """Other reasons why a migration stays Pending."""

    @pytest.mark.parametrize(
        ("running", "outbound", "held"), [(4, 1, False), (5, 1, True), (4, 2, True)]
    )
    def test_the_limits_hold(self, play: Play, *, running: int, outbound: int, held: bool) -> None:
        """Five migrations per cluster and two per node may run. Others retry after five seconds."""
        play.reconcile()
        seen = MigrationView(play.migration, play.vmi, play.pods, [], running, outbound)

        writes = controller.reconcile_migration(seen, NOW, RULES)

        assert (writes.create_pod is None) is held
        assert writes.requeue_at == (at(5) if held else None)

    def test_a_second_active_pod_holds(self, play: Play) -> None:
        """No target pod is created while the VMI has two running pods."""
        play.reconcile()
        play.pods.append(make_pod(play.vmi, "ccccc", on="n3"))

        assert play.reconcile().create_pod is None


class TestGarbage:
    """The garbage collection of finished migrations."""

    def test_the_newest_five_stay(self) -> None:
        """The five newest finished VMIMs are kept, whatever their outcome."""
        vmi = make_vmi()
        finished = [
            through(
                make_evacuation(vmi, f"m{number}", created=number),
                "Failed" if number % 2 else "Succeeded",
            )
            for number in range(7)
        ]
        waiting = through(make_evacuation(vmi, "open", created=0), "Pending")

        surplus = controller.surplus([*reversed(finished), waiting])

        assert [migration["metadata"]["uid"] for migration in surplus] == ["m0", "m1"]


class TestEvacuation:
    """When the evacuation controller creates a migration, and what it looks like."""

    def test_what_stands_in_the_way(self) -> None:
        """A VMIM is created only for a marked VMI that can migrate and has no unfinished VMIM."""
        vmi = make_vmi()
        pod = make_pod(vmi)
        marked = evict(vmi, pod)
        still_open = through(make_evacuation(marked), "Pending")
        failed = through(make_evacuation(marked), "Pending", "Failed")
        pinned = node.set_migratable(marked, migratable=False)
        moved = objects.changed(marked, lambda made: made["status"].update(nodeName="n2"))
        running = {"startTimestamp": "x"}
        moving = objects.changed(marked, lambda made: made["status"].update(migrationState=running))

        assert not controller.needs_evacuation(vmi, [], [pod])
        assert not controller.needs_evacuation(marked, [still_open], [pod])
        assert not controller.needs_evacuation(marked, [], [pod, make_pod(vmi, "bbbbb")])
        assert not controller.needs_evacuation(pinned, [], [pod])
        assert not controller.needs_evacuation(moved, [], [pod])
        assert not controller.needs_evacuation(moving, [], [pod])
        assert controller.needs_evacuation(marked, [failed], [pod])
        assert controller.needs_evacuation(marked, [], [pod])
