"""What a scenario decides for the simulated cluster: fates of migrations, nodes, and the pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from exporter.demo import objects
from exporter.demo.objects import Object


Outcome = Literal["succeeds", "fails", "unschedulable", "loses target", "loses ready target"]


@dataclass(frozen=True, slots=True)
class Fate:
    """How one migration ends."""

    outcome: Outcome = "succeeds"
    copying: float = 5.0
    """Seconds from its start to its end."""
    reason: str = ""
    """Its failure reason."""
    pauses: bool = False
    """Whether the guest is paused halfway, so that the copy can end."""


class Plan(Protocol):
    """A scenario, as the cluster sees it."""

    def fate(self, vmi: Object, attempt: int) -> Fate:
        """How the VMI's next migration ends; the first attempt is 0."""

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        """Choose one of the free nodes for a pod of this VMI."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How many seconds each small step takes, as on real nodes; all are divided by the speed."""

    speed: float = 1.0
    reconcile: float = 0.05
    schedule: float = 0.3
    start_pod: float = 1.5
    run_vmi: float = 0.5
    prepare: float = 0.6
    start: float = 0.5
    detect: float = 0.2
    take_over: float = 0.3
    finalise: float = 0.5
    ready: float = 0.8
    clean_up: float = 0.5
    exit: float = 9.0
    abort: float = 0.6
    aborted: float = 1.0


class Fates:
    """The fates of open migrations: each is decided once, when it is first needed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._fates: dict[str, Fate] = {}
        self._attempts: dict[str, int] = {}

    def of(self, vmi: Object, migration_uid: str) -> Fate:
        """The fate of a VMI's migration."""
        if migration_uid not in self._fates:
            owner = objects.key(vmi)
            attempt = self._attempts.get(owner, 0)
            self._attempts[owner] = attempt + 1
            self._fates[migration_uid] = self.plan.fate(vmi, attempt)
        return self._fates[migration_uid]

    def drop(self, migration_uid: str) -> None:
        """Forget a finished migration."""
        self._fates.pop(migration_uid, None)
