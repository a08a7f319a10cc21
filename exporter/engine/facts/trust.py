"""What may be believed of each resource in each namespace at one instant.

The rules, the diagnosis, the forecast of a drain, the load and the answers ask nothing else about
permissions and lost contact.
"""

from collections.abc import Collection, Mapping
from typing import TypeAlias

from msgspec import Struct

from exporter.engine.facts.model import OPTIONAL_RESOURCES, Instant, Resource, Seconds


DEAD_AFTER: Seconds = 600.0
"""The default of `kube.deadAfter`."""
Contacts: TypeAlias = Mapping[Resource, Instant]
"""The last contact with the watch of each resource; one without an entry is up to date."""
UP_TO_DATE: Contacts = {}
_Limits: TypeAlias = tuple[frozenset[Resource], frozenset[Resource]]
"""The hidden and the dead resources, without those that no verdict needs."""


class NamespaceTrust(Struct, frozen=True, gc=False):
    """What may be believed of the resources in one namespace.

    Objects of the resources in `hidden` are not used at all: they may not be read, or were not
    listed yet. The watches of those in `dead` had no contact for too long: their objects must not
    block an eviction, and explain nothing. An object that cannot be read is believed for
    `dead_after`.
    """

    hidden: frozenset[Resource] = frozenset()
    dead: frozenset[Resource] = frozenset()
    dead_after: Seconds = DEAD_AFTER

    def sees(self, resource: Resource) -> bool:
        """Whether the objects of a resource are used, perhaps only as they last were."""
        return resource not in self.hidden

    def believes(self, resource: Resource) -> bool:
        """Whether the present objects of a resource are known."""
        return resource not in self.hidden and resource not in self.dead

    @property
    def limits(self) -> _Limits:
        """What the verdicts depend on."""
        return self.hidden.difference(OPTIONAL_RESOURCES), self.dead


class Trust(Struct, frozen=True):
    """What may be believed in each namespace.

    `in_namespace` has every watched namespace; it is empty if all namespaces are watched.
    `everywhere` also counts for a namespace that is not watched. The contacts change all the time,
    so `Evidence`, which may be kept, does not have them.
    """

    everywhere: NamespaceTrust = NamespaceTrust()
    in_namespace: Mapping[str, NamespaceTrust] = {}
    contacts_everywhere: Contacts = UP_TO_DATE
    contacts_in_namespace: Mapping[str, Contacts] = {}

    def of(self, namespace: str) -> NamespaceTrust:
        """What may be believed in this namespace."""
        return self.in_namespace.get(namespace, self.everywhere)

    def contacts_of(self, namespace: str) -> Contacts:
        """The last contacts with the watches of this namespace."""
        return self.contacts_in_namespace.get(namespace, self.contacts_everywhere)

    def sees_all(self, *resources: Resource) -> bool:
        """Whether all objects of these resources in the cluster are used."""
        return not self.in_namespace and self.everywhere.hidden.isdisjoint(resources)

    def believes(self, *resources: Resource) -> bool:
        """Whether the objects of these resources in every watched namespace are known."""
        return all(
            place.hidden.isdisjoint(resources) and place.dead.isdisjoint(resources)
            for place in self._places
        )

    @property
    def has_dead(self) -> bool:
        """Whether a resource is dead somewhere."""
        return any(place.dead for place in self._places)

    @property
    def limits(self) -> tuple[_Limits, Mapping[str, _Limits]]:
        """What the verdicts depend on, everywhere and in each namespace."""
        places = self.in_namespace.items()
        return self.everywhere.limits, {name: place.limits for name, place in places}

    @property
    def _places(self) -> Collection[NamespaceTrust]:
        return self.in_namespace.values() or (self.everywhere,)
