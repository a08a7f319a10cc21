"""Putting a VMI with an override into the store."""

import gc
import sys

import msgspec
import pytest

from exporter.engine.facts.model import Resource
from exporter.engine.facts.policy import Policy
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from exporter.health import Watched
from exporter.kube.objects.kubevirt import parse_event
from exporter.kube.watch.feed import Feed, Listing
from exporter.settings import read_settings
from tests.support.builders import KEEP, NAME, NAMESPACE, NOW, a_vmi_json


OVERRIDDEN = read_settings(
    {"policy": {"overrides": [{"name": "gold", "match": {"vmiLabels": {"tier": "go*"}}}]}}
).policy


@pytest.mark.parametrize(
    ("policy", "kept"),
    [pytest.param(Policy(), "", id="none"), pytest.param(OVERRIDDEN, "gold", id="overrides")],
)
def test_no_label_is_kept(policy: Policy, kept: str) -> None:
    """The store has the name of the matching override, but no labels and no priority class."""
    made = a_vmi_json(metadata={"labels": {"tier": "golden-label", "app": "other-label"}})
    made["spec"]["priorityClassName"] = "own-class"
    line = msgspec.json.encode({"type": "ADDED", "object": made})
    gc.collect()
    before = sys.getrefcount(line)
    store = Store(endings_kept=KEEP)
    feed = Feed(store, Watched(Resource.VMIS, None), lambda: NOW, policy=policy)
    changed = parse_event(Resource.VMIS, line)
    feed.put(changed, Listing())  # type: ignore[arg-type]
    del changed

    evidence = store.evidence(NAMESPACE, NAME, Trust())
    assert evidence is not None
    assert evidence.vmi.override == kept
    assert "label" not in repr(evidence)
    assert "own-class" not in repr(evidence)
    assert sys.getrefcount(line) == before
