"""Index of launcher pods: by name, by VMI and by migration."""

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from exporter.engine.facts.mappings import Table, add_to_count
from exporter.engine.facts.model import Pod, Vmi


_Key: TypeAlias = tuple[str, str]


class LauncherIndex:
    """All launcher pods. A pod belongs to a VMI of the same namespace only.

    `crowded` has the UIDs of the VMIs with more than one active pod, `ending` those with an active
    pod that is being deleted.
    """

    def __init__(self) -> None:
        self._pods = Table[_Key, Pod]()
        self._by_vmi = Table[_Key, dict[str, Pod]]()
        self._targets: Counter[_Key] = Counter()
        self.crowded: set[str] = set()
        self.ending: set[str] = set()

    @property
    def pods(self) -> Mapping[_Key, Pod]:
        """All pods by namespace and name."""
        return self._pods

    def put(self, pod: Pod) -> None:
        """Add or replace a pod."""
        key = (pod.namespace, pod.name)
        known = self._pods.get(key)
        if known is not None:
            self._count_target(known, -1)
            if known.vmi_uid != pod.vmi_uid:
                self._forget_owner(known)
        self._pods[key] = pod
        owned = self._by_vmi.setdefault((pod.namespace, pod.vmi_uid), {})
        owned[pod.name] = pod
        self._record_crowd(pod.vmi_uid, owned)
        self._count_target(pod, 1)

    def remove(self, pod: Pod) -> None:
        """Remove a pod that is in the index."""
        del self._pods[pod.namespace, pod.name]
        self._count_target(pod, -1)
        self._forget_owner(pod)

    def _forget_owner(self, pod: Pod) -> None:
        owner = (pod.namespace, pod.vmi_uid)
        owned = self._by_vmi[owner]
        del owned[pod.name]
        self._record_crowd(pod.vmi_uid, owned)
        if not owned:
            del self._by_vmi[owner]

    def _record_crowd(self, vmi_uid: str, pods: Mapping[str, Pod]) -> None:
        active = [pod for pod in pods.values() if not pod.finished]
        is_ending = any(pod.deleted_at is not None for pod in active)
        for uids, applies in ((self.crowded, len(active) > 1), (self.ending, is_ending)):
            if applies:
                uids.add(vmi_uid)
            else:
                uids.discard(vmi_uid)

    def _count_target(self, pod: Pod, pods: int) -> None:
        if pod.migration_uid:
            add_to_count(self._targets, (pod.namespace, pod.migration_uid), pods)

    def of(self, vmi: Vmi) -> tuple[Pod, ...]:
        """All launcher pods of a VMI."""
        return tuple(self._by_vmi.get((vmi.namespace, vmi.uid), {}).values())

    def current(self, vmi: Vmi) -> Pod | None:
        """The newest pod on the VMI's node, as in KubeVirt's `CurrentVMIPod`.

        Of pods that were created in the same second, a pod that still runs is preferred.
        """
        pods = self._by_vmi.get((vmi.namespace, vmi.uid))
        if not pods or not vmi.node:
            return None
        on_node = (pod for pod in pods.values() if pod.node == vmi.node)
        return max(
            on_node,
            default=None,
            key=lambda pod: (pod.created or 0.0, not pod.finished, pod.name),
        )

    def has_target(self, namespace: str, migration_uid: str) -> bool:
        """Whether a migration has a target pod."""
        return (namespace, migration_uid) in self._targets
