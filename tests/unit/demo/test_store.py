"""The object store: versions, updates, and deletion in two steps."""

from __future__ import annotations

import pytest

from exporter.demo.status import StatusError
from exporter.demo.store import MIGRATIONS, PODS, VMIS, ObjectStore, merge

from .facts import make_store


@pytest.fixture
def store() -> ObjectStore:
    """A store with one namespace."""
    return make_store()


def vmi(name: str = "db1") -> dict[str, object]:
    """A small VMI."""
    return {"metadata": {"namespace": "shop", "name": name}, "spec": {}}


def test_a_status_subresource_keeps_the_status_apart(store: ObjectStore) -> None:
    """With a status subresource, other writes cannot change the status."""
    body = {"metadata": {"namespace": "shop", "name": "m"}, "spec": {"vmiName": "db1"}}

    made = store.create(MIGRATIONS, {**body, "status": {"phase": "Running"}})
    plain = store.update(MIGRATIONS, {**body, "status": {"phase": "Running"}})
    own = store.update(MIGRATIONS, {**body, "status": {"phase": "Running"}}, subresource=True)

    assert "status" not in made
    assert "status" not in plain
    assert own["status"] == {"phase": "Running"}
    assert own["metadata"]["generation"] == 1


def test_the_vmi_has_no_status_subresource(store: ObjectStore) -> None:
    """A VMI's status is written with the object, and changes its generation."""
    store.create(VMIS, vmi())

    written = store.update(VMIS, {**vmi(), "status": {"phase": "Running"}})

    assert written["status"] == {"phase": "Running"}
    assert written["metadata"]["generation"] == 2


def test_a_write_that_changes_nothing_is_not_written(store: ObjectStore) -> None:
    """An update without a change gives no new version."""
    store.create(VMIS, vmi())
    before = store.revision

    store.update(VMIS, vmi())

    assert store.revision == before


def test_an_old_version_is_refused(store: ObjectStore) -> None:
    """An update with an old resourceVersion is a conflict."""
    made = store.create(VMIS, vmi())
    store.update(VMIS, {**vmi(), "status": {"phase": "Running"}})

    with pytest.raises(StatusError) as refused:
        store.update(VMIS, made)

    assert refused.value.code == 409
    assert "the object has been modified" in str(refused.value)


def test_a_finalizer_holds_a_deleted_object(store: ObjectStore) -> None:
    """A deleted object stays, with a deletion time, until its finalizer is removed."""
    held = vmi() | {"metadata": {"namespace": "shop", "name": "db1", "finalizers": ["x/y"]}}
    store.create(VMIS, held)

    left = store.delete(VMIS, "shop", "db1")
    assert left is not None
    assert left["metadata"]["deletionTimestamp"] == "2026-08-22T10:00:00Z"
    store.update(VMIS, vmi())

    assert store.find(VMIS, "shop", "db1") is None


def test_a_bound_pod_waits_for_its_kubelet(store: ObjectStore) -> None:
    """A deleted pod on a node stays, with a deletion time, until the kubelet removes the pod."""
    body = {"metadata": {"namespace": "shop", "name": "p"}, "spec": {"nodeName": "n1"}}
    store.create(PODS, body)

    left = store.delete(PODS, "shop", "p")
    again = store.delete(PODS, "shop", "p")
    gone = store.delete(PODS, "shop", "p", grace=0)

    assert left is not None
    assert left["metadata"]["deletionGracePeriodSeconds"] == 30
    assert again == left
    assert gone is None


@pytest.mark.parametrize(
    ("target", "changes", "merged"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"a": [1]}, {"a": [2, 3]}, {"a": [2, 3]}),
        ({"a": "x"}, {"a": {"b": None}}, {"a": {}}),
    ],
    ids=["adds", "removes", "replaces a list", "turns a value into an object"],
)
def test_merge_patches_follow_rfc_7396(target: object, changes: object, merged: object) -> None:
    """In a merge patch null removes a field, objects are merged, and other values are replaced."""
    assert merge(target, changes) == merged
