"""Which known objects cannot be read any more, and since when."""

from collections.abc import Iterable

from exporter.engine.facts.model import Instant, Pod, Resource, Vmi, Vmim


class UnreadableObjects:
    """Objects that could be read earlier but not now. Their last readable version still counts."""

    def __init__(self) -> None:
        self._since: dict[tuple[Resource, str, str], Instant] = {}

    def record(self, resource: Resource, namespace: str, name: str, at: Instant) -> bool:
        """Note that an object cannot be read; False if that was known."""
        key = (resource, namespace, name)
        is_news = key not in self._since
        self._since.setdefault(key, at)
        return is_news

    def forget(self, resource: Resource, namespace: str, name: str) -> bool:
        """Note that an object can be read again, or is gone; True if it was noted as unreadable."""
        return bool(self._since) and self._since.pop((resource, namespace, name), None) is not None

    def find(
        self, vmi: Vmi, vmims: Iterable[Vmim], launcher: Pod | None
    ) -> tuple[tuple[Resource, Instant], ...]:
        """Which of a VMI, its unfinished VMIMs and its launcher cannot be read, and since when."""
        if not self._since:
            return ()
        objects: list[tuple[Resource, Vmi | Vmim | Pod]] = [(Resource.VMIS, vmi)]
        objects += [(Resource.VMIMS, vmim) for vmim in vmims if not vmim.finished]
        objects += [] if launcher is None else [(Resource.PODS, launcher)]
        instants = (
            (kind, self._since.get((kind, fact.namespace, fact.name))) for kind, fact in objects
        )
        return tuple((kind, since) for kind, since in instants if since is not None)
