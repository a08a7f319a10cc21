"""The virt-handlers with their launchers, working on the store; what they write is in `node.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from exporter.demo import node, objects
from exporter.demo.actions import ActionQueue
from exporter.demo.client import Client
from exporter.demo.kubelet import Kubelet
from exporter.demo.objects import Object
from exporter.demo.plan import Fate, Fates, Pace
from exporter.demo.store import VMIS


class VirtHandler:
    """Runs new VMIs, and takes each migration from hand-off to its end.

    `skews`: by how much the clock of a node is fast; others are right.
    """

    def __init__(
        self,
        client: Client,
        queue: ActionQueue,
        fates: Fates,
        pace: Pace,
        kubelet: Kubelet,
        *,
        seed: int,
        skews: Mapping[str, timedelta],
    ) -> None:
        self._client = client
        self._queue = queue
        self._fates = fates
        self._pace = pace
        self._kubelet = kubelet
        self._random = random.Random(seed)
        self._skews = skews
        self._started: dict[str, str] = {}
        """Per VMI: the last migration that was begun."""

    def sync(self, vmi: Object) -> None:
        """Queue the next step of a VMI that has changed."""
        key, uid = objects.key(vmi), vmi["metadata"]["uid"]
        if objects.phase(vmi) == "Scheduled":
            self._queue.after(self._pace.run_vmi, lambda: self._run(key), f"run {uid}")
        state = objects.state_of(vmi)
        if not state or "endTimestamp" in state:
            return
        job = state["migrationUid"]
        if state.get("abortRequested"):
            self._abort(key, job, state)
        elif self._started.get(uid) != job and "startTimestamp" not in state:
            self._started[uid] = job
            self._migrate(key, job, self._fates.of(vmi, job))

    def forget(self, vmi: Object) -> None:
        """Forget a deleted VMI."""
        self._started.pop(vmi["metadata"]["uid"], None)

    def _now(self, vmi: Object, end: str) -> datetime:
        """The time by the clock of a migration's `sourceNode` or `targetNode`."""
        host = (objects.state_of(vmi) or {}).get(end, "")
        return self._queue.now + self._skews.get(host, timedelta())

    def _run(self, key: str) -> None:
        vmi = self._client.vmi(key)
        if vmi is not None and objects.phase(vmi) == "Scheduled":
            self._client.write(VMIS, vmi, node.run_vmi(vmi, self._queue.now))

    def _migrate(self, key: str, job: str, fate: Fate) -> None:
        """Queue all steps of a migration, from the target's preparation to its end."""
        pace, queue = self._pace, self._queue
        if fate.outcome == "loses target":
            queue.after(pace.prepare, lambda: self._lose_target(key, job))
            return
        ports = {str(self._random.randrange(30_000, 60_000)): port for port in (0, 49152)}
        host = f"10.244.0.{self._random.randrange(2, 250)}"
        queue.after(
            pace.prepare,
            lambda: self._change(key, job, lambda vmi: node.prepare_target(vmi, host, ports)),
        )
        started = pace.prepare + pace.start
        if fate.outcome == "loses ready target":
            queue.after(started, lambda: self._lose_target(key, job))
            return
        queue.after(
            started,
            lambda: self._change(
                key, job, lambda vmi: node.start_migration(vmi, self._now(vmi, "sourceNode"))
            ),
        )
        queue.after(started + pace.detect, lambda: self._change(key, job, node.detect_domain))
        ended = started + max(fate.copying, pace.detect)
        if fate.pauses:
            paused = started + fate.copying / 2
            queue.after(paused, lambda: self._change(key, job, node.pause_guest))
        if fate.outcome == "fails":
            queue.after(ended, lambda: self._fail(key, job, fate.reason, None))
        else:
            queue.after(
                ended,
                lambda: self._change(
                    key, job, lambda vmi: node.ready_domain(vmi, self._now(vmi, "targetNode"))
                ),
            )
            queue.after(ended + pace.take_over, lambda: self._end(key, job))

    def _lose_target(self, key: str, job: str) -> None:
        state = objects.state_of(self._client.vmi(key) or {})
        if state.get("migrationUid") == job:
            self._kubelet.exit(key.split("/", maxsplit=1)[0], state["targetPod"], "Failed")

    def _end(self, key: str, job: str) -> None:
        ended = self._change(
            key, job, lambda vmi: node.end_migration(vmi, self._now(vmi, "targetNode"))
        )
        if ended is None:
            return
        source = ended["status"]["migrationState"].get("sourcePod", "")
        self._exit_later(key, source, "Succeeded")
        self._queue.after(
            self._pace.finalise,
            lambda: self._change(key, job, node.finalise_migration, ended=True),
        )
        self._clean_up_later(key, job, self._pace.finalise + self._pace.clean_up)

    def _abort(self, key: str, job: str, state: Object) -> None:
        """Queue the next step of an abort. A migration that ends before the abort succeeds."""
        if "abortStatus" not in state:
            begin = lambda: self._change(key, job, node.begin_abort)  # noqa: E731
            self._queue.after(self._pace.abort, begin, f"abort {job}")
        else:
            fail = lambda: self._finish_abort(key, job)  # noqa: E731
            self._queue.after(self._pace.aborted, fail, f"aborted {job}")

    def _finish_abort(self, key: str, job: str) -> None:
        state = objects.state_of(self._client.vmi(key) or {})
        if "targetNodeDomainReadyTimestamp" not in state:
            self._fail(key, job, node.ABORTED, "Succeeded")

    def _fail(self, key: str, job: str, reason: str, abort_status: str | None) -> None:
        failed = self._change(
            key,
            job,
            lambda vmi: node.fail_migration(
                vmi, self._now(vmi, "sourceNode"), reason, abort_status
            ),
        )
        if failed is None:
            return
        target = failed["status"]["migrationState"]["targetPod"]
        self._exit_later(key, target, node.phase_of_failed_target(failed))
        self._clean_up_later(key, job, self._pace.clean_up)

    def _exit_later(self, key: str, pod: str, phase: str) -> None:
        namespace = key.split("/", maxsplit=1)[0]
        self._queue.after(self._pace.exit, lambda: self._kubelet.exit(namespace, pod, phase))

    def _clean_up_later(self, key: str, job: str, seconds: float) -> None:
        self._queue.after(seconds, lambda: self._change(key, job, node.clean_up_target, ended=True))

    def _change(
        self, key: str, job: str, change: Callable[[Object], Object], *, ended: bool = False
    ) -> Object | None:
        """Change a VMI if its migration is still `job`, and has ended if and only if `ended`."""
        vmi = self._client.vmi(key)
        if vmi is None or objects.is_deleting(vmi):
            return None
        state = objects.state_of(vmi)
        if state.get("migrationUid") != job or ("endTimestamp" in state) != ended:
            return None
        after = change(vmi)
        self._client.write(VMIS, vmi, after)
        return after
