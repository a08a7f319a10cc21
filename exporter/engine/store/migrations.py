"""Index of VMIMs, and which VMI each of them belongs to.

A VMIM only names a VMI. It belongs to the VMI with that namespace and name if

- its UID was ever that VMI's migration UID (the proof), or
- it was not created before the VMI, or one of the creation times is missing.

The binding is final, unless another VMI of that name is read later. Then the VMIM is bound to that
other VMI if

- there is proof for the other VMI, or
- there is no proof for the first VMI, and the VMIM was created after the other VMI.

A VMIM whose VMI is not known yet waits. A deleted VMIM waits too, within `WAITING_LIMIT`, if it was
handed off and has no proof: its VMI may be the next VMI of that name.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TypeAlias

from msgspec import Struct

from exporter.engine.facts.mappings import Table
from exporter.engine.facts.model import Vmi, Vmim
from exporter.engine.store.launchers import LauncherIndex
from exporter.engine.store.load import RUNNING_PHASES
from exporter.engine.store.vmi_record import VmiRecord


_Key: TypeAlias = tuple[str, str]

WAITING_LIMIT = 1_000
"""How many VMI names may have deleted VMIMs that wait."""


class Binding(Struct, gc=False):
    """A VMIM and the UID of the VMI that it belongs to ("" while it waits)."""

    vmim: Vmim
    owner: str = ""
    proven: bool = False

    @property
    def vmi_key(self) -> _Key:
        """The namespace and name of the VMI that the VMIM names."""
        return self.vmim.namespace, self.vmim.vmi_name


class VmimIndex:
    """All VMIMs with their bindings; at most `keep` deleted VMIMs wait per VMI.

    `failing` counts the failed VMIMs by the VMI that they name.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._bindings: dict[str, dict[str, Binding]] = {}
        self._unfinished = Table[_Key, Binding]()
        self._by_vmi = Table[_Key, tuple[Binding, ...]]()
        self._waiting = Table[_Key, dict[str, Binding]]()
        self.failing: Counter[_Key] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._bindings.values()))

    def keys(self) -> Iterator[_Key]:
        """The namespaces and names of all existing VMIMs."""
        return ((place, name) for place, names in self._bindings.items() for name in names)

    def find(self, namespace: str, name: str) -> Binding | None:
        """The binding of an existing VMIM."""
        return self._bindings.get(namespace, {}).get(name)

    def put(self, vmim: Vmim) -> Binding:
        """Add or update a VMIM."""
        binding = self.find(vmim.namespace, vmim.name)
        if binding is not None:
            self._count_failure(binding.vmim, -1)
        self._count_failure(vmim, 1)
        if binding is None:
            binding = Binding(vmim)
            self._bindings.setdefault(vmim.namespace, {})[vmim.name] = binding
            self._by_vmi[binding.vmi_key] = (*self.naming(binding.vmi_key), binding)
        binding.vmim = vmim
        if vmim.finished:
            self._unfinished.pop((vmim.namespace, vmim.name), None)
        else:
            self._unfinished[vmim.namespace, vmim.name] = binding
        return binding

    def remove_binding(self, binding: Binding) -> None:
        """Remove a VMIM from the index; it waits if its VMI may not have been read yet."""
        vmim, vmi_key = binding.vmim, binding.vmi_key
        self._count_failure(vmim, -1)
        del self._bindings[vmim.namespace][vmim.name]
        if not self._bindings[vmim.namespace]:
            del self._bindings[vmim.namespace]
        self._unfinished.pop((vmim.namespace, vmim.name), None)
        others = tuple(other for other in self._by_vmi[vmi_key] if other is not binding)
        if others:
            self._by_vmi[vmi_key] = others
        else:
            del self._by_vmi[vmi_key]
        if vmim.handed_off and not binding.proven:
            waiting = self._waiting.setdefault(vmi_key, {})
            waiting[vmim.uid or vmim.name] = binding
            if len(waiting) > self._keep:
                del waiting[next(iter(waiting))]
            if len(self._waiting) > WAITING_LIMIT:
                del self._waiting[next(iter(self._waiting))]

    def _count_failure(self, vmim: Vmim, change: int) -> None:
        if vmim.phase != "Failed":
            return
        key = (vmim.namespace, vmim.vmi_name)
        self.failing[key] += change
        if not self.failing[key]:
            del self.failing[key]

    def naming(self, vmi_key: _Key) -> tuple[Binding, ...]:
        """The bindings of the VMIMs that name this VMI, whether or not they belong to it."""
        return self._by_vmi.get(vmi_key, ())

    def owned_by(self, vmi: Vmi) -> Iterator[Vmim]:
        """The existing VMIMs that belong to a VMI."""
        named = self.naming((vmi.namespace, vmi.name))
        return (binding.vmim for binding in named if binding.owner == vmi.uid)

    def bind_all(self, record: VmiRecord) -> Iterator[Binding]:
        """Bind all VMIMs that name this VMI, even if they wait; yields those that belong to it."""
        key = record.key
        for binding in self.naming(key):
            if bind(binding, record):
                yield binding
        if key not in self._waiting:
            return
        for uid, binding in self._waiting.pop(key).items():
            if bind(binding, record):
                yield binding
            if not binding.proven:
                self._waiting.setdefault(key, {})[uid] = binding

    def count_running(
        self, launchers: LauncherIndex, vmi_of: Callable[[_Key], Vmi | None]
    ) -> tuple[int, dict[str, tuple[str, ...]]]:
        """The running migrations: their number, and the VMIs (namespace/name) that leave each node,
        those that are still on it first.

        They are counted as in KubeVirt's `findRunningMigrations`: a Pending migration counts if it
        has a target pod.

        Only unfinished VMIMs are visited, because there are up to five finished VMIMs per VMI.
        """
        movers = defaultdict[str, list[tuple[bool, str]]](list)
        running = 0
        for binding in self._unfinished.values():
            vmim = binding.vmim
            waits = vmim.phase == "Pending"
            if waits and not launchers.has_target(vmim.namespace, vmim.uid):
                continue
            if not waits and vmim.phase not in RUNNING_PHASES:
                continue
            running += 1
            vmi = vmi_of(binding.vmi_key)
            if vmi is not None:
                for node in _find_sources(vmi):
                    movers[node].append((node != vmi.node, f"{vmi.namespace}/{vmi.name}"))
        return running, {
            node: tuple(name for _, name in sorted(vmis)) for node, vmis in movers.items()
        }


def bind(binding: Binding, record: VmiRecord) -> bool:
    """Bind a VMIM to a VMI that it names, if allowed; True if the VMIM belongs to the VMI."""
    vmim, vmi = binding.vmim, record.vmi
    if vmim.uid in record.proofs:
        binding.owner, binding.proven = vmi.uid, True
    elif binding.owner != vmi.uid:
        if binding.proven or not _may_belong(vmim, vmi, rebound=bool(binding.owner)):
            return False
        binding.owner = vmi.uid
    return True


def _may_belong(vmim: Vmim, vmi: Vmi, *, rebound: bool) -> bool:
    """Whether a VMIM may belong to a VMI by their creation times.

    A VMIM of an older VMI of that name is rebound only if it was created after this VMI, or
    if it was created in the same second and has not finished.
    """
    if vmim.created is None or vmi.created is None:
        return not rebound
    if vmim.created == vmi.created:
        return not (rebound and vmim.finished)
    return vmim.created > vmi.created


def _find_sources(vmi: Vmi) -> list[str]:
    """The nodes for which KubeVirt counts a migration of this VMI (`outboundMigrationsOnNode`).

    These are the VMI's node, and the source node of its last hand-off, even of an older migration.
    """
    state = vmi.migration
    if state is None or state.source_node in ("", vmi.node):
        return [vmi.node]
    return [vmi.node, state.source_node]
