"""Finds the launcher pods whose eviction a PodDisruptionBudget forbids."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from exporter.engine.facts.changes import Key
from exporter.engine.facts.model import Budget, Pod


class Budgets:
    """The budgets that allow no disruption, and the pods that they select.

    `pods` are all launcher pods.
    """

    def __init__(self, pods: Mapping[Key, Pod]) -> None:
        self._pods = pods
        self._forbidding: defaultdict[str, dict[str, Budget]] = defaultdict(dict)
        self._by_pod: dict[Key, str] = {}
        self._outdated: set[str] = set()

    def __len__(self) -> int:
        return sum(map(len, self._forbidding.values()))

    def copy(self) -> "Budgets":
        """A copy for `find` and `guarded`, which later changes do not reach."""
        self._refresh()
        other = Budgets({})
        other._by_pod = self._by_pod.copy()
        return other

    def keys(self) -> list[Key]:
        """The namespaces and names of the budgets."""
        return [(space, name) for space, budgets in self._forbidding.items() for name in budgets]

    def guarded(self) -> Iterable[Key]:
        """The pods that no one may evict."""
        self._refresh()
        return tuple(self._by_pod)

    def find(self, pod: Pod | None) -> str:
        """The name of a budget that forbids the eviction of a pod; "" if none does."""
        self._refresh()
        return "" if pod is None else self._by_pod.get((pod.namespace, pod.name), "")

    def put(self, budget: Budget) -> bool:
        """Apply a budget; True if that changed anything."""
        if not budget.forbids:
            return self.remove(budget.namespace, budget.name)
        known = self._forbidding[budget.namespace]
        if known.get(budget.name) == budget:
            return False
        known[budget.name] = budget
        self._outdated.add(budget.namespace)
        return True

    def remove(self, namespace: str, name: str) -> bool:
        """Remove a budget; True if it forbade disruptions."""
        if name not in self._forbidding.get(namespace, ()):
            return False
        del self._forbidding[namespace][name]
        self._outdated.add(namespace)
        return True

    def record_pod(self, pod: Pod) -> None:
        """Apply a pod that has changed or is gone."""
        key = (pod.namespace, pod.name)
        self._by_pod.pop(key, None)
        budgets = self._forbidding.get(pod.namespace)
        if budgets and key in self._pods:
            names = (budget.name for budget in budgets.values() if budget.selects(pod))
            name = min(names, default=None)
            if name is not None:
                self._by_pod[key] = name

    def _refresh(self) -> None:
        """Select pods again in all namespaces whose budgets have changed."""
        if self._outdated:
            for pod in self._pods.values():
                if pod.namespace in self._outdated:
                    self.record_pod(pod)
            self._outdated.clear()
