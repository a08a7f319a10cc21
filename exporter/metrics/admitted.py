"""Chooses the VMs that have series of their own."""

from collections.abc import Iterable

from exporter.engine.facts.model import Vmi


class AdmittedVms:
    """All VMs but those that are added after `most` others; each VM counts once.

    If there are at most `most` VMs, none need be added.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._admitted: set[str] = set()
        self._left_out: set[str] = set()

    def add(self, vmis: Iterable[Vmi]) -> None:
        """Add VMs that would have series if there were no limit."""
        for vmi in vmis:
            if vmi.uid not in self._admitted:
                is_full = len(self._admitted) >= self._most
                (self._left_out if is_full else self._admitted).add(vmi.uid)

    def __contains__(self, vmi: Vmi) -> bool:
        return vmi.uid not in self._left_out

    @property
    def left_out(self) -> int:
        """How many VMs have no series because of the limit."""
        return len(self._left_out)
