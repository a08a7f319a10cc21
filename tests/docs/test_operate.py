"""docs/operate.md names events, metrics, exit codes, alerts and tests that exist."""

import re

from exporter.errors import Exit
from exporter.metrics.exposition import FAMILIES
from tests.generate.rules import all_alerts, load_groups
from tests.support.documents import OPERATE, ROOT, table


METRICS = {family.name for family in FAMILIES}


def sources(folder: str, pattern: str) -> str:
    """All Python files of a folder as one text."""
    files = (ROOT / folder).rglob(pattern)
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


SHOWN_BY = {
    "all replicas are down": "each_fault_lets_evictions_pass, a_sidecar_that_fails",
    "the process is killed": "a_killed_process_answers_as_one_that_never_was,"
    " a_killed_process_knows_what_was_written",
    "API server killed": "the_watches_go_on_when_the_server_does",
    "API server frozen": "the_watches_go_on_when_the_server_does",
    "a line of the history file": "a_damaged_line_loses_only_its_own_vmi, a_damaged_file",
    "the history file is": "a_file_that_is_no_history, a_damaged_file",
    "the disk is full": "a_full_disk, a_write_that_fails",
    "the clock jumps": "a_clock_that_jumps, evidence_dies_in_time",
    "a login plugin": "a_plugin_that_hangs",
    "the token's file": "a_new_token_that_cannot_be_used, a_file_without_a_token",
    "SIGTERM": "sigterm",
    "SIGTERM while": "sigterm_without_a_server",
}
"""The tests that cause each fault of the table; the keys begin its rows, in order."""


def test_every_fault_is_shown_by_a_test() -> None:
    """The tests, metrics and alerts of each row exist."""
    tests = sources("tests", "test_*.py")
    rows = table(OPERATE, "When something fails")

    for (fault, seen, _), (beginning, names) in zip(rows, SHOWN_BY.items(), strict=True):
        assert fault.startswith(beginning)
        for name in names.split(", "):
            assert f"def test_{name}(" in tests, name
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
