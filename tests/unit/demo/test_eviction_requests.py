"""The simulated controllers of EvictionRequests write what the real ones wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.demo import objects
from exporter.demo.eviction_requests import apply_status
from exporter.demo.objects import Object, format_time
from exporter.demo.plan import Fate
from exporter.demo.status import StatusError
from exporter.demo.store import EVICTION_REQUESTS, EVICTIONS
from tests.unit.demo.lab import Lab, ask, withdraw


RECORDED = Path(__file__).parents[2] / "data" / "evictions"
HOLD = "example.com/hold"
DRAIN, UPGRADE = "example.com/drain", "example.com/upgrade"


class RequestLab(Lab):
    """A cluster with db1, whose migrations take a minute, and in which somebody evicts it."""

    def __init__(self, responder: str = "", **condition: Any) -> None:
        super().__init__(fate=Fate(copying=60.0))
        self.cluster.answer_requests(responder)
        self.create("db1")
        self.run(30)
        if condition:
            self.cluster.change_vmi(
                "shop",
                "db1",
                lambda vmi: objects.changed(
                    vmi, lambda changed: objects.set_condition(changed, condition)
                ),
            )

    def ask(self, requester: str = DRAIN) -> str:
        """Make an EvictionRequest for the VM's pod; returns its name."""
        return ask(self.cluster, "db1", requester)

    def evictions(self) -> list[Object]:
        """All Evictions."""
        return [*self.cluster.store.objects(EVICTIONS)]

    def write(self, **entry: Any) -> None:
        """Write the entry of the responder, as it is applied on the server."""
        (eviction,) = self.evictions()
        name = eviction["metadata"]["name"]
        state = {"responders": [{"name": HOLD, **entry}]}
        apply_status(self.cluster.store, "shop", name, {"status": state})

    def states(self) -> list[str]:
        """The states of the responders of the last Eviction."""
        return [row["state"] for row in self.evictions()[-1]["status"]["targetResponders"]]


def summarize(eviction: Object) -> Object:
    """What an Eviction says, without names and times."""
    state = eviction["status"]
    return {
        "conditions": [(row["type"], row["status"], row["reason"]) for row in state["conditions"]],
        "states": [(row["name"], row["state"]) for row in state["targetResponders"]],
        "requesters": [(row["name"], row["intent"]) for row in state["requesters"]],
        "entries": [
            (row["name"], set(row) - {"expectedCompletionTime"}) for row in state["responders"]
        ],
    }


def play(case: str) -> RequestLab:
    """Do what was done when the case was recorded."""
    lab = RequestLab(
        **({"type": "LiveMigratable", "status": "False"} if case == "not-migratable" else {})
    )
    first = lab.ask()
    second = lab.ask(UPGRADE) if "withdrawn" in case else ""
    lab.run(5)
    if second:
        withdraw(lab.cluster, first)
    if case == "withdrawn":
        withdraw(lab.cluster, second)
    lab.run(90 if case == "left" else 5)
    return lab


@pytest.mark.parametrize("case", ["left", "moving", "withdrawn", "one-withdrawn", "not-migratable"])
def test_the_same_as_recorded(case: str) -> None:
    """Conditions, states, requesters and entries are those of the real controllers."""
    recorded = json.loads((RECORDED / f"{case}.json").read_text(encoding="utf-8"))["evictions"]
    assert [summarize(row) for row in play(case).evictions()] == [summarize(o) for o in recorded]


def test_a_responder_that_completes_is_followed_by_the_next() -> None:
    """The one with the highest priority comes first."""
    lab = RequestLab(HOLD)
    lab.ask()
    lab.run(1)
    assert lab.states() == ["Active", "Inactive"]
    now = format_time(lab.cluster.instant)
    lab.write(heartbeatTime=now, message="held")
    lab.run(1)
    lab.write(heartbeatTime=now, completionTime=now, message="held")
    lab.run(1)
    assert lab.states() == ["Completed", "Active"]


def test_a_responder_that_is_silent_is_passed_over() -> None:
    """After 20 minutes."""
    lab = RequestLab(HOLD)
    lab.ask()
    lab.run(19 * 60)
    assert lab.states() == ["Active", "Inactive"]
    lab.run(2 * 60)
    assert lab.states()[0] == "Interrupted"


def test_after_a_deleted_request_its_eviction_is_gone() -> None:
    """It is cancelled first."""
    lab = RequestLab(HOLD)
    request = lab.ask()
    lab.run(1)
    lab.cluster.store.delete(EVICTION_REQUESTS, "shop", request)
    lab.run(0.25)
    assert lab.states() == ["Canceled", "Inactive"]
    lab.run(0.5)
    assert lab.evictions() == []


@pytest.mark.parametrize(
    ("entry", "refusal"),
    [
        ({"heartbeatTime": "2000-01-01T00:00:00Z"}, "cannot be decreased"),
        ({"message": "no heartbeat"}, "is required once set"),
        ({"name": "example.com/other", "heartbeatTime": "now"}, "field is immutable"),
    ],
)
def test_what_the_server_refuses(entry: dict[str, Any], refusal: str) -> None:
    """An entry keeps its heartbeat, which only grows, and only the active one changes."""
    lab = RequestLab(HOLD)
    lab.ask()
    lab.run(1)
    lab.write(heartbeatTime=format_time(lab.cluster.instant))
    with pytest.raises(StatusError, match=refusal):
        lab.write(**entry)
