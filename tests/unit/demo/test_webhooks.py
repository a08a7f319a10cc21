"""virt-api's webhooks: evictions that become evacuations."""

from __future__ import annotations

import pytest

from exporter.demo import node, objects, webhooks

from .facts import NOW, evict, make_pod, make_vmi


class TestEviction:
    """The eviction webhook."""

    @pytest.mark.parametrize(
        ("strategy", "migratable", "code", "marks"),
        [
            ("None", True, 200, False),
            ("LiveMigrate", True, 429, True),
            ("LiveMigrate", False, 429, False),
            ("LiveMigrateIfPossible", True, 429, True),
            ("LiveMigrateIfPossible", False, 200, False),
            ("External", True, 429, True),
            ("External", False, 429, True),
        ],
    )
    def test_the_strategy_decides(
        self, *, strategy: str, migratable: bool, code: int, marks: bool
    ) -> None:
        """Strategy and migratability decide whether a VMI is marked, refused or evicted."""
        vmi = node.set_migratable(make_vmi(strategy=strategy), migratable=migratable)

        answer = webhooks.admit_eviction(vmi, make_pod(vmi), descheduler=False)

        assert answer.code == code
        assert (answer.vmi is not None) is marks
        if answer.vmi is not None:
            assert answer.vmi["status"]["evacuationNodeName"] == "n1"
            assert answer.message == 'Eviction triggered evacuation of VMI "shop/db1"'

    def test_the_descheduler_is_the_source(self) -> None:
        """The descheduler's eviction sets the source, and a later drain does not remove it."""
        vmi = make_vmi()
        by_descheduler = webhooks.admit_eviction(vmi, make_pod(vmi), descheduler=True).vmi
        assert by_descheduler is not None
        freed = webhooks.cancel_evacuation(by_descheduler)
        drained = webhooks.admit_eviction(freed, make_pod(vmi), descheduler=False).vmi
        assert drained is not None

        assert objects.annotations(by_descheduler)[objects.EVICTION_SOURCE] == "descheduler"
        assert objects.annotations(drained)[objects.EVICTION_SOURCE] == "descheduler"

    def test_a_second_eviction(self) -> None:
        """A marked VMI is not marked again."""
        vmi = make_vmi()
        answer = webhooks.admit_eviction(evict(vmi, make_pod(vmi)), make_pod(vmi), descheduler=True)

        assert answer.vmi is None
        assert answer.message.startswith("Evacuation in progress: Eviction triggered evacuation")

    def test_a_target_pod_is_not_evicted(self) -> None:
        """The eviction of a target pod is refused, and the VMI is not marked."""
        vmi = make_vmi()

        answer = webhooks.admit_eviction(vmi, make_pod(vmi, on="n2"), descheduler=True)

        assert (answer.code, answer.vmi) == (429, None)
        assert answer.message == "Eviction request for target Pod"

    def test_finished_pods_may_go(self) -> None:
        """Finished launcher pods may be evicted."""
        vmi = make_vmi()
        done = node.finish_pod(make_pod(vmi), "Succeeded", NOW)

        assert webhooks.admit_eviction(vmi, done, descheduler=True).code == 200
