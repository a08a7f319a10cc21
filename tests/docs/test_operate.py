"""docs/operate.md names events, metrics, exit codes, alerts and tests that exist."""

import re

from exporter.cli.commands import Exit
from exporter.metrics.families import FAMILIES
from tests.generate.rules import all_alerts, load_groups
from tests.support.documents import OPERATE, ROOT, table


METRICS = {family.name for family in FAMILIES}


def sources(folder: str, pattern: str) -> str:
    """All Python files of a folder as one text."""
    files = (ROOT / folder).rglob(pattern)
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_every_fault_is_shown_by_a_test() -> None:
    """The tests, metrics and alerts in each row exist."""
    tests = sources("tests", "test_*.py")
    rows = table(OPERATE, "When something fails")

    assert rows
    for fault, seen, _, shown_by in rows:
        names = re.findall(r"`(test_\w+)`", shown_by)
        assert names, fault
        for name in names:
            assert f"def {name}(" in tests, name
        for metric in re.findall(r"`…(_\w+)", seen):
            assert f"kubevirt_eviction_exporter{metric}" in METRICS
        for alert in re.findall(r"`(KubeVirt\w+)`", seen):
            assert alert in all_alerts(load_groups())


def test_every_oddity_is_described_in_the_program_s_words() -> None:
    """The log events, metrics and exit codes in each row exist."""
    program = sources("exporter", "*.py")
    rows = table(OPERATE, "When something is odd")

    assert rows
    for seen, events, metrics, meaning, cure in rows:
        assert meaning
        assert cure
        for event in re.findall(r"`([a-z_]+)`", events):
            assert f'"{event}"' in program, event
        for metric in re.findall(r"`((?:…|kubevirt|descheduler)_\w+)`", metrics):
            assert metric.replace("…", "kubevirt_eviction_exporter") in METRICS, metric
        for code in re.findall(r"exit (\d)", seen + events):
            assert int(code) in list(Exit)
