"""The responder: writes the answers to EvictionRequests into the status of Evictions.

Kubernetes passes a responder over that has not written for 20 minutes, so every failure here ends
in what would happen without the exporter. Each answer is a server-side apply of the whole entry,
because a field that is left out is deleted (`message`) or refused (`heartbeatTime`).
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import structlog

from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.facts.model import Eviction, Instant, Resource, Seconds, Vmi
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy, Verdict
from exporter.engine.store.store import Store
from exporter.health import Health, ResponderHealth
from exporter.kube.client import Absent, ApiError, ApiServer, Conflict, Overloaded
from exporter.kube.lease import Lease
from exporter.kube.objects.instants import write_time
from exporter.logs import Trouble
from exporter.responder.responses import Response, Step, respond
from exporter.settings import EvictionRequestSettings
from exporter.text import clean


PAUSE: Seconds = 1.0
HOLD_JUDGED_EVERY: Seconds = 5.0
"""How often a hold is judged before its cooldown ends; 1,000 judgements take 0.1 s."""
SLICE = 50
"""How many Evictions are judged without yielding, which takes about 5 ms."""
MOST_REQUESTS = 10
"""The most requests at once, and so in a second."""
HEARTBEAT: Seconds = 120.0
"""How often an unchanged answer is written."""
SHORTEST: Seconds = 20.0
"""How soon a changed answer may be written."""
FIRST_RETRY: Seconds = 15.0
LONGEST_RETRY: Seconds = 600.0
"""A refused eviction is asked again after pauses that double from the first to the longest, as
Kubernetes' own responder does."""
LONGEST_MESSAGE = 4000
"""The most characters of a message (`pkg/apis/lifecycle/validation`)."""
FIELD_MANAGER = "kubevirt-eviction-exporter"
REQUESTERS = f"{FIELD_MANAGER}.io/requesters"
"""The annotation of an eviction with the names of those who asked by EvictionRequests."""

log = structlog.stdlib.get_logger()


@dataclass
class Turn:
    """What this process has done about one Eviction; times are those of its monotonic clock.

    `judge_at`: when to choose the response again, by the wall clock. `response` is the present one.
    `refusal` is the answer to the last eviction, the `refusals`th that was refused, and asked at
    `asked_at`. `reasons` are those whose hold has been counted. `held_since`: when the hold began,
    by the server's clock; None if it is over.
    """

    judge_at: Instant = -math.inf
    written_at: Seconds = -math.inf
    completed_at: Seconds = -math.inf
    asked_at: Seconds = -math.inf
    response: Response | None = None
    refusal: str = ""
    refusals: int = 0
    reasons: set[Reason] = field(default_factory=set)
    held_since: Instant | None = None

    def may_ask(self, now: Seconds) -> bool:
        """Whether an eviction may be asked for at `now`."""
        pause = min(LONGEST_RETRY, FIRST_RETRY * 2.0 ** max(0, self.refusals - 1))
        return now - self.asked_at >= pause

    @property
    def message(self) -> str:
        """The message to write."""
        if self.response is None:
            return ""
        message = self.response.message
        if self.refusal and self.response.step is Step.EVICT:
            message += f" Its eviction was refused: {self.refusal}"
        return message[:LONGEST_MESSAGE]


@dataclass
class Responder:
    """Answers the Evictions in which it is this responder's turn, while `lease` is held.

    `count_hold` is called once for each hold and reason, and `record_hold` with the length of each
    hold. `longest_hold` is `admission.maxHold`.
    """

    api: ApiServer
    store: Store
    health: Health
    policy: Policy
    stuck: StuckPolicy
    settings: EvictionRequestSettings
    lease: Lease
    _: KW_ONLY
    longest_hold: Seconds
    clock: Callable[[], Instant]
    count_hold: Callable[[Vmi, Verdict, Reason, Instant], None]
    record_hold: Callable[[Seconds], None]
    monotonic: Callable[[], Seconds] = time.monotonic
    status: ResponderHealth = field(default_factory=ResponderHealth)

    def __post_init__(self) -> None:
        self._turns: dict[str, Turn] = {}
        self._trouble = Trouble("eviction_request_not_answered")

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self.answer_due()
            await asyncio.sleep(PAUSE)

    async def answer_due(self) -> None:
        """Judge each Eviction, and send the most urgent requests, at most `MOST_REQUESTS`."""
        if not (self.lease.held and self.health.ready):
            self._turns.clear()
            self.status.turns = None
            return
        evictions = {
            eviction.uid: eviction
            for eviction in self.store.evictions.list_turns(self.settings.name)
        }
        for uid in self._turns.keys() - evictions.keys():
            self._end_hold(self._turns.pop(uid))
        now, due = self.clock(), []
        conditions = read_conditions(self.store, self.stuck, self.health.read_trust(now), now)
        for count, eviction in enumerate(evictions.values(), 1):
            if eviction.uid not in self._turns:
                self._turns[eviction.uid] = self._begin_turn(eviction)
            turn = self._turns[eviction.uid]
            if now >= turn.judge_at:
                self._choose_response(eviction, turn, conditions)
            urgency = self._measure_urgency(eviction, turn)
            if urgency > 0:
                due.append((urgency, eviction, turn))
            if count % SLICE == 0:
                await asyncio.sleep(0)
        self.status.turns = len(evictions)
        due.sort(key=lambda row: row[0], reverse=True)
        acts = (self._act(eviction, turn) for _, eviction, turn in due[:MOST_REQUESTS])
        errors = await asyncio.gather(*acts)
        if not errors:
            return
        self.status.trouble = next(filter(None, errors), "")
        if self.status.trouble:
            self._trouble.record(self.status.trouble)
        else:
            self._trouble.end()

    def _begin_turn(self, eviction: Eviction) -> Turn:
        """A new turn. What another process has written before counts as written by this one."""
        if eviction.heartbeat_at is None:
            return Turn()
        age = max(0.0, self.api.read_server_time() - eviction.heartbeat_at)
        return Turn(written_at=self.monotonic() - age)

    def _choose_response(self, eviction: Eviction, turn: Turn, conditions: Conditions) -> None:
        """Choose the response; there is none while the pod or its VM is not known."""
        turn.response = None
        pod, vmi = self.store.find_pod(eviction.namespace, eviction.pod) or (None, None)
        if pod is None or vmi is None or pod.uid != eviction.pod_uid:
            return
        evidence = self.store.evidence(vmi.namespace, vmi.name, conditions.trust)
        if evidence is None:
            return
        turn.response = respond(
            eviction,
            pod,
            evidence,
            conditions,
            self.policy,
            why=self.store.reasons(vmi),
            longest_hold=self.longest_hold,
            evicts=self.settings.evict,
        )
        if turn.response.step is Step.HOLD:
            turn.judge_at = conditions.now + HOLD_JUDGED_EVERY
            if turn.response.expected_at is not None:
                turn.judge_at = min(turn.judge_at, turn.response.expected_at)
            turn.held_since = eviction.started_at or eviction.created
            self._count_hold(eviction, turn, vmi, conditions.now)
        else:
            self._end_hold(turn)

    def _count_hold(self, eviction: Eviction, turn: Turn, vmi: Vmi, now: Instant) -> None:
        verdict = None if turn.response is None else turn.response.verdict
        if verdict is None or verdict.reason is None or verdict.reason in turn.reasons:
            return
        turn.reasons.add(verdict.reason)
        if not self._is_written(eviction, turn):  # else another process has counted it
            self.count_hold(vmi, verdict, verdict.reason, now)

    def _end_hold(self, turn: Turn) -> None:
        if turn.held_since is not None:
            self.record_hold(max(0.0, self.api.read_server_time() - turn.held_since))
            turn.held_since = None

    def _measure_urgency(self, eviction: Eviction, turn: Turn) -> Seconds:
        """How urgent a request is; 0: none is due."""
        now, response = self.monotonic(), turn.response
        if response is None:
            return 0.0
        if response.step is Step.EVICT and turn.may_ask(now):
            return math.inf
        if response.step is Step.COMPLETE:
            return math.inf if now - turn.completed_at >= SHORTEST else 0.0
        age = now - turn.written_at
        return age if age >= (HEARTBEAT if self._is_written(eviction, turn) else SHORTEST) else 0.0

    @staticmethod
    def _is_written(eviction: Eviction, turn: Turn) -> bool:
        """Whether the Eviction has this message already."""
        return eviction.heartbeat_at is not None and eviction.message == clean(turn.message)

    async def _act(self, eviction: Eviction, turn: Turn) -> str:
        """Send one request; returns why it failed, "" if it did not."""
        try:
            evicts = turn.response is not None and turn.response.step is Step.EVICT
            if evicts and turn.may_ask(self.monotonic()):
                await self._evict(eviction, turn)
            else:
                await self._write(eviction, turn)
        except (Absent, Conflict):
            return ""  # the pod or the Eviction has gone meanwhile, which the watch will show
        except ApiError as error:
            return str(error)
        return ""

    async def _evict(self, eviction: Eviction, turn: Turn) -> None:
        """Ask for the eviction of the pod, which KubeVirt refuses when it begins to move the VM."""
        turn.asked_at = self.monotonic()
        place = {"namespace": eviction.namespace, "name": eviction.pod}
        annotations = {REQUESTERS: ",".join(eviction.askers)}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {**place, "annotations": annotations},
            "deleteOptions": {"preconditions": {"uid": eviction.pod_uid}},
        }
        path = f"/api/v1/namespaces/{eviction.namespace}/pods/{eviction.pod}/eviction"
        try:
            await self.api.create(path, body)
        except Overloaded as refusal:
            turn.refusal, turn.refusals = str(refusal), turn.refusals + 1
        log.info("eviction_asked_for", **place, requesters=eviction.askers, answer=turn.refusal)

    async def _write(self, eviction: Eviction, turn: Turn) -> None:
        """Write the entry of this responder, and nothing else."""
        response = turn.response
        if response is None:
            return
        turn.written_at = self.monotonic()
        now = math.floor(self.api.read_server_time())
        # The time that we know may be late, and a heartbeat before these is refused.
        heartbeat = max(now, eviction.started_at or 0.0, eviction.heartbeat_at or 0.0)
        entry = {
            "name": self.settings.name,
            "heartbeatTime": write_time(heartbeat),
            "message": turn.message,
        }
        if response.expected_at is not None and response.expected_at > now:
            entry["expectedCompletionTime"] = write_time(math.ceil(response.expected_at))
        if response.step is Step.COMPLETE:
            turn.completed_at = turn.written_at
            entry["completionTime"] = entry["heartbeatTime"]
        metadata = {"namespace": eviction.namespace, "name": eviction.name, "uid": eviction.uid}
        await self.api.apply_status(
            Resource.EVICTIONS,
            {
                "apiVersion": "lifecycle.k8s.io/v1alpha1",
                "kind": "Eviction",
                "metadata": metadata,
                "status": {"responders": [entry]},
            },
            manager=FIELD_MANAGER,
        )
