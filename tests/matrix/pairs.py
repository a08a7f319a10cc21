"""The versions that are tested together, and the results of each pair."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.versions import PINNED


RESULTS = Path(__file__).parent / "results.json"
SUITES = {
    "rig": "tests/integration/kubevirt/test_rig.py",
    "descheduler's scenes": "tests/integration/descheduling/test_scenes.py",
    "watch": "tests/integration/apiserver/test_both_servers.py",
    "webhook": "tests/integration/apiserver/test_admission_live.py",
    "EvictionRequests": "tests/integration/kubevirt/test_eviction_requests.py",
    "EvictionRequests told": "tests/integration/apiserver/test_eviction_requests.py",
}
_REQUESTS = ("EvictionRequests", "EvictionRequests told")
_ORDINARY = tuple(suite for suite in SUITES if suite not in _REQUESTS)
"""The suites of an ordinary pair; EvictionRequests are answered from Kubernetes 1.38 on."""

ABOUT_KUBEVIRT = "rig: KubeVirt "
"""The beginning of the reported lines that are about the running version of KubeVirt."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A version of each part, and the suites that are run with these versions."""

    versions: Mapping[str, str]
    suites: tuple[str, ...] = _ORDINARY

    @classmethod
    def of(cls, *suites: str, **versions: str) -> "Pair":
        """The pinned versions with these changes; a keyword has `_` in place of a hyphen."""
        changed = {part.replace("_", "-"): version for part, version in versions.items()}
        return cls(PINNED | changed, suites or _ORDINARY)

    @property
    def changed(self) -> dict[str, str]:
        """The parts whose version is not the pinned one."""
        return {part: version for part, version in self.versions.items() if version != PINNED[part]}

    def __str__(self) -> str:
        return ", ".join(f"{part} {version}" for part, version in self.versions.items())


PAIRS = (
    Pair.of(),
    Pair.of("rig", "watch", "webhook", *_REQUESTS, kube_apiserver="1.38.0-beta.0"),
    Pair.of(kube_apiserver="1.36.3"),
    Pair.of(kubevirt="1.8.4", kube_apiserver="1.36.3"),
    Pair.of(kubevirt="1.7.0", kube_apiserver="1.36.3"),
    Pair.of(kubevirt="1.6.0", kube_apiserver="1.36.3"),
    Pair.of(kubevirt="1.5.0", kube_apiserver="1.36.3"),
    Pair.of("rig", "watch", kubevirt="1.8.4", kube_apiserver="1.35.4"),
    Pair.of("rig", "watch", kubevirt="1.8.4", kube_apiserver="1.34.4"),
    Pair.of("descheduler's scenes", kube_apiserver="1.36.3", descheduler="0.33.0"),
)
"""Each tested version of a part, with versions of the other parts that work with it."""


TESTED = (
    *("exporter", "deploy/descheduler/verdicts", "tests/cluster", "tests/integration/descheduling"),
    *SUITES.values(),
)
"""What a run tests: the package with its simulated nodes, the plugin, the rig and the suites."""


@dataclass(slots=True)
class Result:
    """The result of a run of one pair."""

    versions: Mapping[str, str]
    date: str = ""
    """The day of the run."""
    commit: str = ""
    """The commit that was tested; with `+` if what was tested had changes."""
    tests: dict[str, list[str]] = field(default_factory=dict)
    """The names of the tests that passed, by suite."""
    failed: list[str] = field(default_factory=list)
    """The names of the tests that failed."""
    lacks: list[str] = field(default_factory=list)
    """Features that this version lacks, so that their tests were skipped."""
    proven: list[str] = field(default_factory=list)
    """The lines that tests report about KubeVirt."""
    unbuilt: str = ""
    """Why the versions cannot be built; empty if they can."""

    @property
    def verdict(self) -> str:
        """The result in one phrase."""
        if self.unbuilt:
            return f"cannot be built: {self.unbuilt}"
        passed = ", ".join(f"{suite} {len(names)}" for suite, names in self.tests.items())
        parts = [f"passed: {passed}"]
        if self.failed:
            parts.append(f"failed: {', '.join(self.failed)}")
        if self.lacks:
            parts.append(f"missing: {', '.join(self.lacks)}")
        return "; ".join(parts)


def read_results(path: Path = RESULTS) -> list[Result]:
    """The results of the last runs, in the order of `PAIRS`."""
    kept: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.exists() else []
    return [Result(**result) for result in kept]


def keep(result: Result, path: Path = RESULTS) -> None:
    """Write a result, which replaces the last result of the same pair."""
    kept = {_key(row): row for row in read_results(path)} | {_key(result): result}
    order = [_key(pair) for pair in PAIRS]
    ordered = [asdict(kept[key]) for key in order if key in kept]
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def _key(pair: Pair | Result) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(pair.versions.items()))
