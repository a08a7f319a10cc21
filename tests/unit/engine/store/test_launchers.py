"""The index of launcher pods, when pods change and are deleted."""

from exporter.engine.store.launchers import LauncherIndex
from tests.support.builders import NAMESPACE, UID, a_pod


def test_a_target_that_changes_is_counted_once() -> None:
    """A target pod that changes is counted once, and no longer after its deletion."""
    launchers = LauncherIndex()
    launchers.put(a_pod(migration_uid="m1"))
    launchers.put(a_pod(migration_uid="m1", ready=False))
    assert launchers.has_target(NAMESPACE, "m1")
    launchers.remove(launchers.pods[NAMESPACE, a_pod().name])
    assert not launchers.has_target(NAMESPACE, "m1")


def test_nothing_is_left_of_a_vmi_without_pods() -> None:
    """When the last pod is deleted the index is empty."""
    launchers = LauncherIndex()
    launchers.put(a_pod(migration_uid="m1"))
    launchers.put(a_pod(vmi_uid="another"))
    launchers.remove(a_pod(vmi_uid="another"))
    left = (launchers.pods, launchers._by_vmi, launchers._targets)  # noqa: SLF001 (memory, which no answer shows)
    assert left == ({}, {}, {})


def test_which_vmis_have_more_than_one_active_pod() -> None:
    """`crowded` has a VMI while two of its pods are active."""
    index = LauncherIndex()
    first, other = a_pod(), a_pod(name="other", uid="other")
    crowds = []
    for pod in (first, other, a_pod(name="other", uid="other", phase="Succeeded"), other):
        index.put(pod)
        crowds.append(index.crowded.copy())
    index.remove(other)
    crowds.append(index.crowded.copy())
    assert crowds == [set(), {UID}, set(), {UID}, set()]
