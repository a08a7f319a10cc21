"""Kubernetes' two controllers of EvictionRequests, and the rules for the status of an Eviction.

They work on the store as those of Kubernetes 1.38.0-beta.0 do: one Eviction for all requests for a
pod, one responder at a time, and Kubernetes' own, which evicts, at last.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from exporter.demo import objects, status
from exporter.demo.objects import Object, format_time
from exporter.demo.status import StatusError
from exporter.demo.store import EVICTION_REQUESTS, EVICTIONS, PODS, ObjectStore
from exporter.demo.webhooks import Eviction


EVICTOR = "imperative-eviction.k8s.io/evictor"
EVICTOR_PRIORITY = 100
PASSED_OVER_AFTER = timedelta(minutes=20)
"""A responder that has not written for this long is interrupted."""
LAST_WORD = timedelta(seconds=5)
"""How long a responder may take to complete after the end of the pod."""
WAITS = "AwaitingEviction"
_OF_FALSE = (WAITS, "Succeeded", "EvictionFailed")
"""The reasons of conditions that are false."""
FIRST_RETRY = timedelta(seconds=5)
LONGEST_RETRY = timedelta(seconds=600)


class EvictionControllers:
    """Reconciles EvictionRequests and Evictions; `evict` is the eviction of a pod by name."""

    def __init__(self, store: ObjectStore, evict: Callable[[str, str], Eviction]) -> None:
        self._store = store
        self._evict = evict
        self._attempts: dict[str, tuple[int, datetime]] = {}
        """By the Eviction's UID: how many evictions were refused, and when to try again."""
        self._ended_at: dict[str, datetime] = {}
        """When the pod of an Eviction was first seen to have ended."""

    def reconcile(self) -> None:
        """Bring every Eviction up to date."""
        asked: dict[tuple[str, str], list[Object]] = {}
        for request in self._store.objects(EVICTION_REQUESTS):
            pod = request["spec"]["target"]["pod"]
            place = (request["metadata"]["namespace"], pod["uid"])
            asked.setdefault(place, []).append(request)
        known: dict[tuple[str, str], list[Object]] = {}
        for eviction in self._store.objects(EVICTIONS):
            place = (eviction["metadata"]["namespace"], eviction["spec"]["target"]["pod"]["uid"])
            known.setdefault(place, []).append(eviction)
        for place in {**asked, **known}:
            self._reconcile_pod(asked.get(place, []), known.get(place, []))

    def _reconcile_pod(self, requests: list[Object], evictions: list[Object]) -> None:
        wanted = any(request["spec"]["intent"] == "Eviction" for request in requests)
        open_evictions = [eviction for eviction in evictions if not _has_ended(eviction)]
        if not open_evictions:
            if not requests:
                for ended in evictions:
                    place = ended["metadata"]
                    self._store.delete(EVICTIONS, place["namespace"], place["name"])
            elif wanted and not any(_is_true(eviction, "TargetEvicted") for eviction in evictions):
                self._create(requests, len(evictions) + 1)
            return
        for eviction in open_evictions:
            changed = objects.changed(eviction, lambda body: self._advance(body, requests))
            if changed != eviction:
                self._store.update(EVICTIONS, changed, subresource=True)

    def _create(self, requests: list[Object], number: int) -> None:
        target = requests[0]["spec"]["target"]["pod"]
        namespace = requests[0]["metadata"]["namespace"]
        pod = self._store.find(PODS, namespace, target["name"])
        if pod is None or pod["metadata"]["uid"] != target["uid"]:
            return
        own: list[Object] = [{"name": EVICTOR, "priority": EVICTOR_PRIORITY, "state": "Inactive"}]
        own += [
            {**responder, "state": "Inactive"}
            for responder in pod["spec"].get("evictionResponders", [])
        ]
        made = self._store.create(
            EVICTIONS,
            {
                "apiVersion": EVICTIONS.api_version,
                "kind": EVICTIONS.kind,
                "metadata": {"namespace": namespace, "name": f"pod-{number}-{target['name']}"},
                "spec": {"target": {"pod": target}},
            },
        )
        state = {
            "targetResponders": sorted(own, key=lambda turn: -turn["priority"]),
            "responders": [],
        }
        self._set_conditions(state, {"Failed": WAITS, "TargetEvicted": WAITS})
        started = objects.changed(made, lambda body: body.update(status=state))
        changed = objects.changed(started, lambda body: self._advance(body, requests))
        self._store.update(EVICTIONS, changed, subresource=True)

    def _advance(self, eviction: Object, requests: list[Object]) -> None:
        state, now = eviction["status"], format_time(self._store.clock())
        named = {
            request["spec"]["requester"]: request["spec"]["intent"]
            for request in sorted(
                requests,
                key=lambda request: (request["spec"]["intent"], str(request["spec"]["requester"])),
            )
        }
        state["requesters"] = [{"name": name, "intent": named[name]} for name in named]
        pod = eviction["spec"]["target"]["pod"]
        present = self._store.find(PODS, eviction["metadata"]["namespace"], pod["name"])
        turns = state["targetResponders"]
        active = next((turn for turn in turns if turn["state"] == "Active"), None)
        is_gone = present is None or present["metadata"]["uid"] != pod["uid"]
        if is_gone or objects.is_final(present or {}):
            if self._awaits_last_word(eviction, active):
                return
            self._end(state, evicted="PodDeleted" if is_gone else "PodTerminal")
        elif "Eviction" not in named.values():
            if active is not None:
                active["state"] = "Canceled"
            self._end(state, failed="CanceledDueToNoRequesters")
        else:
            if active is not None and self._is_over(active, _entry_of(state, active["name"])):
                active = None
            waiting = next((turn for turn in turns if turn["state"] == "Inactive"), None)
            if active is None and waiting is not None:
                active = waiting
                active["state"] = "Active"
                state["responders"].append({"name": active["name"], "startTime": now})
            elif active is None:
                self._end(state, failed="NoFurtherResponder")
            if active is not None and active["name"] == EVICTOR:
                self._try_eviction(eviction, _entry_of(state, EVICTOR))

    def _awaits_last_word(self, eviction: Object, active: Object | None) -> bool:
        """Whether the active responder may still complete, although the pod has ended."""
        if active is None:
            return False
        entry = _entry_of(eviction["status"], active["name"])
        if active["name"] == EVICTOR:
            entry["completionTime"] = entry["heartbeatTime"] = format_time(self._store.clock())
        if self._is_over(active, entry):
            return False
        uid, now = eviction["metadata"]["uid"], self._store.clock()
        if now - self._ended_at.setdefault(uid, now) < LAST_WORD:
            return True
        active["state"] = "Interrupted"
        return False

    def _is_over(self, turn: Object, entry: Object) -> bool:
        last = datetime.fromisoformat(entry.get("heartbeatTime") or entry["startTime"])
        if "completionTime" in entry:
            turn["state"] = "Completed"
        elif self._store.clock() - last >= PASSED_OVER_AFTER:
            turn["state"] = "Interrupted"
        return bool(turn["state"] != "Active")

    def _end(self, state: Object, *, evicted: str = "", failed: str = "") -> None:
        if evicted:
            self._set_conditions(state, {"Failed": "Succeeded", "TargetEvicted": evicted})
        else:
            self._set_conditions(state, {"Failed": failed, "TargetEvicted": "EvictionFailed"})

    def _set_conditions(self, state: Object, reasons: dict[str, str]) -> None:
        """Set the conditions, which are true if their reason says so."""
        state["conditions"] = [
            {
                "type": kind,
                "status": "False" if reason in _OF_FALSE else "True",
                "reason": reason,
                "message": "",
                "lastTransitionTime": format_time(self._store.clock()),
            }
            for kind, reason in reasons.items()
        ]

    def _try_eviction(self, eviction: Object, entry: Object) -> None:
        now, uid = self._store.clock(), eviction["metadata"]["uid"]
        attempts, due = self._attempts.get(uid, (0, now))
        if now < due:
            return
        pod = eviction["spec"]["target"]["pod"]["name"]
        answer = self._evict(eviction["metadata"]["namespace"], pod)
        pause = min(LONGEST_RETRY, FIRST_RETRY * 2**attempts)
        self._attempts[uid] = (attempts + 1, now + pause)
        entry["heartbeatTime"] = format_time(now)
        entry["message"] = (
            f'"{pod}" pod deletion via the /eviction subresource failed (attempts={attempts + 1}):'
            f" {answer.message}"
        )


def apply_status(store: ObjectStore, namespace: str, name: str, applied: Object) -> Object:
    """Server-side apply of one responder's entry, by whoever has written it before.

    Raises `StatusError` as the API server does: 409 for another UID, 422 if it is not this
    responder's turn, or if a field that has to stay is missing or moves backwards.
    """
    eviction = store.get(EVICTIONS, namespace, name)
    uid = (applied.get("metadata") or {}).get("uid")
    if uid and uid != eviction["metadata"]["uid"]:
        raise status.conflict(EVICTIONS, name, "Precondition failed: UID in precondition")
    (entry,) = applied["status"]["responders"]
    turns = {turn["name"]: turn["state"] for turn in eviction["status"]["targetResponders"]}
    if turns.get(entry["name"]) != "Active":
        raise _refuse(name, "responders", "field is immutable")
    before = _entry_of(eviction["status"], entry["name"])
    for field in ("heartbeatTime", "completionTime"):
        if field in before and field not in entry:
            raise _refuse(name, field, "is required once set")
    if entry.get("heartbeatTime", "") < before.get("heartbeatTime", ""):
        raise _refuse(name, "heartbeatTime", "cannot be decreased")

    def write(changed: Object) -> None:
        mine = _entry_of(changed["status"], entry["name"])
        start = mine["startTime"]
        mine.clear()
        mine.update(entry, startTime=start)

    return store.update(EVICTIONS, objects.changed(eviction, write), subresource=True)


def _refuse(name: str, field: str, why: str) -> StatusError:
    causes = [("FieldValueInvalid", f"status.responders.{field}", why)]
    return status.invalid(EVICTIONS.group, EVICTIONS.plural, name, causes)


def _entry_of(state: Object, name: str) -> Any:
    return next(entry for entry in state["responders"] if entry["name"] == name)


def _is_true(eviction: Object, condition: str) -> bool:
    conditions = eviction["status"].get("conditions", [])
    return any(row["type"] == condition and row["status"] == "True" for row in conditions)


def _has_ended(eviction: Object) -> bool:
    return _is_true(eviction, "Failed") or _is_true(eviction, "TargetEvicted")
