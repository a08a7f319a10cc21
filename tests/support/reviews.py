"""Admission reviews as the API server sends them, valid and invalid."""

import copy
import random
from typing import Any

from tests.support.builders import NAMESPACE, Json


POD = "virt-launcher-db1-x"
DESCHEDULER = "system:serviceaccount:kube-system:descheduler-sa"
REVIEW_UID = "705ab4f5-6393-11e8-b7cc-42010a800002"
PODS_RESOURCE = {"group": "", "version": "v1", "resource": "pods"}
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1.5,
    10**30,
    "",
    "x" * 5000,
    "\u202e\x00\n",
    [],
    {},
    ["All"],
    [["All"], {"a": [None]}],
    {"username": DESCHEDULER},
    "Eviction triggered evacuation",
)


def a_review(*, review: Json | None = None, eviction: Json | None = None, **request: Any) -> Json:
    """The review of an eviction of db1's pod by the descheduler; keywords change its request."""
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": REVIEW_UID,
            "kind": {"group": "policy", "version": "v1", "kind": "Eviction"},
            "resource": PODS_RESOURCE,
            "subResource": "eviction",
            "requestKind": {"group": "policy", "version": "v1", "kind": "Eviction"},
            "requestResource": PODS_RESOURCE,
            "requestSubResource": "eviction",
            "name": POD,
            "namespace": NAMESPACE,
            "operation": "CREATE",
            "userInfo": {
                "username": DESCHEDULER,
                "uid": "u1",
                "groups": ["system:serviceaccounts", "system:authenticated"],
            },
            "object": {
                "kind": "Eviction",
                "apiVersion": "policy/v1",
                "metadata": {"name": POD, "namespace": NAMESPACE, "creationTimestamp": None},
            }
            | (eviction or {}),
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        }
        | request,
    } | (review or {})


def a_spoilt_review(rng: random.Random) -> Json:
    """A review with up to four fields changed to unusual values, or removed."""
    whole = copy.deepcopy(a_review())
    for _ in range(rng.randrange(5)):
        place: Any = whole
        path = rng.choice(_places(whole))
        for key in path[:-1]:
            place = place[key]
        if rng.random() < 0.3:
            del place[path[-1]]
        else:
            place[path[-1]] = rng.choice(ODD_VALUES)
    return whole


def _places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return []
    return [place for key in value for place in ((*path, key), *_places(value[key], (*path, key)))]
