"""Random changes of one VM, and the exporter's answers about it."""

import random
from typing import Any

from msgspec.structs import replace

from exporter.engine.evacuations.diagnosis import diagnose
from exporter.engine.facts.model import (
    Checkpoint,
    Fact,
    MigrationState,
    Outcome,
    Resource,
    Trigger,
    Vmim,
)
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from tests.support.builders import NAME, NAMESPACE, NOW, a_pod, a_vmi, a_vmim
from tests.support.stores import put, remove
from tests.support.verdicts import decide


class Life:
    """One VM in a cluster: its present objects, and each random change as facts.

    KubeVirt keeps five finished VMIMs and empties `migrationState` at each hand-off. The clocks of
    some nodes are two hours wrong, and some ends are never written to the VMI.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = NOW
        self.vmi = a_vmi(created=NOW - 100)
        self.vmims: dict[str, Vmim] = {}
        self.made = 0

    def objects(self) -> list[Fact]:
        """The present objects, in any order."""
        shown: list[Fact] = [self.vmi, a_pod(), *self.vmims.values()]
        self.rng.shuffle(shown)
        return shown

    def live(self, *stores: Store) -> None:
        """Make one random step, and put its changes into these stores."""
        self.now += self.rng.choice([1.0, 30.0, 900.0])
        for fact in self.step():
            for store in stores:
                put(store, fact, at=self.now)
        finished = [vmim for vmim in self.vmims.values() if vmim.finished]
        for vmim in finished[:-5]:
            del self.vmims[vmim.name]
            for store in stores:
                remove(store, Resource.VMIMS, vmim.namespace, vmim.name, at=self.now)

    def step(self) -> list[Fact]:
        """Make one random change."""
        open_one = next((v for v in self.vmims.values() if not v.finished), None)
        if open_one is None:
            return self.begin()
        if not open_one.handed_off:
            if self.rng.random() < 0.3:
                return [self.change(open_one, **self.ending("Failed", Outcome.FAILED))]
            self.vmi = replace(self.vmi, migration=MigrationState(uid=open_one.uid))
            return [self.change(open_one, phase="Scheduled", handed_off=True), self.vmi]
        state = self.vmi.migration
        assert state is not None
        if state.start is None:
            self.vmi = replace(self.vmi, migration=replace(state, start=self.now))
            return [self.vmi]
        good = self.rng.random() < 0.6
        outcome = Outcome.SUCCEEDED if good else Outcome.FAILED
        if self.rng.random() < 0.1:
            return [self.change(open_one, **self.ending("Failed", Outcome.FAILED))]
        end = self.now + self.rng.choice([0.0, 0.0, -7200.0, 7200.0])
        ended = replace(state, ended=True, end=end, outcome=outcome)
        self.vmi = replace(self.vmi, migration=ended, evacuation_node="" if good else self.marked)
        times = {"start": ended.start, "end": ended.end}
        final = self.ending("Succeeded" if good else "Failed", outcome)
        return [self.vmi, self.change(open_one, **final, **times)]

    @property
    def marked(self) -> str:
        """The node that the VM must leave, if any."""
        return self.vmi.evacuation_node

    def begin(self) -> list[Fact]:
        """Request or cancel an evacuation, or create the next VMIM."""
        choice = self.rng.random()
        if choice < 0.15:
            self.vmi = replace(self.vmi, evacuation_node="" if self.marked else "n1")
            return [self.vmi]
        self.made += 1
        evacuates = {"evacuates": self.marked, "trigger": Trigger.EVACUATION} if self.marked else {}
        made = a_vmim(name=f"m{self.made}", uid=f"m{self.made}", created=self.now, **evacuates)
        self.vmims[made.name] = made
        return [made]

    def ending(self, phase: str, outcome: Outcome) -> dict[str, Any]:
        """The fields of a VMIM that finishes now."""
        return {"phase": phase, "finished": True, "finished_at": self.now, "outcome": outcome}

    def change(self, vmim: Vmim, **fields: Any) -> Vmim:
        """Change a VMIM; returns the new version."""
        changed = self.vmims[vmim.name] = replace(vmim, **fields)
        return changed


def answers_of(store: Store, now: float) -> dict[str, object]:
    """The verdicts and the diagnosis of the VMI."""
    evidence = store.evidence(NAMESPACE, NAME, Trust())
    assert evidence is not None
    diagnosis = diagnose(evidence, StuckPolicy(), None, now)
    return {
        **{one: decide(evidence, Policy(), now, checkpoint=one) for one in Checkpoint},
        "evacuation": diagnosis
        and (
            diagnosis.requested_at,
            evidence.requested_by,
            diagnosis.failed_attempts,
            diagnosis.stuck,
            diagnosis.state,
        ),
    }
