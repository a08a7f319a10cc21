"""The tables of docs/versions.md and results.md, from `make matrix` and the recorded states."""

from collections.abc import Iterable, Sequence

from exporter.engine.facts.states import State
from tests.cluster.recording import RECORDED
from tests.matrix.pairs import SUITES, Result, read_results
from tests.support import documents
from tests.support.documents import MATRIX_RESULTS, VERSIONS, build_table, read


Row = Sequence[str]


def write_document() -> None:
    """Write the tables into docs/versions.md and results.md."""
    results = read_results()
    VERSIONS.write_text(fill(read(VERSIONS), results), encoding="utf-8")
    MATRIX_RESULTS.write_text(fill_results(read(MATRIX_RESULTS), results), encoding="utf-8")


def fill(text: str, results: Sequence[Result]) -> str:
    """docs/versions.md with these results between its markers."""
    head = ("KubeVirt", "Kubernetes", "descheduler", *SUITES)
    head = (*head, "failed", "missing", "run on", "commit")
    return documents.fill(
        text, {"matrix:pairs": build_table(head, (_pair_row(result) for result in results))}
    )


def fill_results(text: str, results: Sequence[Result]) -> str:
    """results.md with what was measured and recorded between its markers."""
    tables = {
        "matrix:proven": "".join(f"- {line}\n" for line in _measured(results)),
        "matrix:recorded": _recorded(),
    }
    return documents.fill(text, tables)


def _pair_row(result: Result) -> Row:
    versions = [result.versions[part] for part in ("kubevirt", "kube-apiserver", "descheduler")]
    if result.unbuilt:
        fault = f"cannot be built: {result.unbuilt}"
        return [*versions, *("" for _ in SUITES), "", fault, result.date, result.commit]
    passed = [
        str(len(result.tests[suite])) if suite in result.tests else "not run" for suite in SUITES
    ]
    passed_all = "none" if result.tests else ""
    failed = ", ".join(f"`{name}`" for name in result.failed) or passed_all
    return [*versions, *passed, failed, ", ".join(result.lacks), result.date, result.commit]


def _measured(results: Iterable[Result]) -> Iterable[str]:
    """The measurements of KubeVirt, each once with the versions that it holds for."""
    versions: dict[str, list[str]] = {}
    for line in (
        line.removeprefix("rig: KubeVirt ") for result in results for line in result.proven
    ):
        version, _, fault = line.partition(": ")
        if version not in versions.setdefault(fault, []):
            versions[fault].append(version)
    return (f"KubeVirt {', '.join(names)}: {fault}" for fault, names in versions.items())


def _recorded() -> str:
    versions = sorted({path.parent.name for path in RECORDED.glob("*/*.json")})
    states = {
        version: {path.stem for path in (RECORDED / version).glob("*.json")} for version in versions
    }
    rows = (
        [f"`{state}`", *("yes" if state in states[version] else "" for version in versions)]
        for state in State
        if any(state in row for row in states.values())
    )
    return build_table(["state", *versions], rows)
