"""Who asked for the eviction of a VMI, until the evacuation appears."""

from collections import OrderedDict

from exporter.engine.evidence import ASKED_WITHIN, Requester
from exporter.engine.model import Instant


VMIS_KEPT = 5_000


class Requesters:
    """The first request for the eviction of each VMI, by UID, for `ASKED_WITHIN`.

    An admission webhook is asked before KubeVirt marks the VMI, so a request may come to nothing.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[str, Requester] = OrderedDict()

    def note(self, uid: str, requester: Requester) -> None:
        """Somebody asks for the eviction of a VMI; the newest `VMIS_KEPT` VMIs are kept."""
        self._prune(requester.at)
        self._first.setdefault(uid, requester)
        if len(self._first) > VMIS_KEPT:
            self._first.popitem(last=False)

    def take(self, uid: str, now: Instant) -> Requester | None:
        """Remove and return the request for a VMI that is marked now."""
        self._prune(now)
        return self._first.pop(uid, None)

    def _prune(self, now: Instant) -> None:
        while self._first and not 0 <= now - next(iter(self._first.values())).at <= ASKED_WITHIN:
            self._first.popitem(last=False)
