"""docs/reference.md: the rows of each table are exactly those of the program."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml
from msgspec import structs

from exporter.engine.evacuations.events import (
    BURST,
    MOST_BLOCKED,
    PER_SECOND,
    PER_VMI,
    REPEATED_AFTER,
    EventOutcome,
    EventReason,
)
from exporter.engine.facts.model import EndReason
from exporter.errors import Exit
from exporter.kube.events import TYPES_AND_ACTIONS
from exporter.metrics.exposition import FAMILIES
from exporter.metrics.family import Family
from exporter.server.api.openapi import ROUTES, Route
from exporter.server.http.budget import BUDGET
from exporter.settings import Settings, read_settings
from exporter.settings.document import InvalidSettings
from exporter.words import Stability
from tests.generate.reference import fill_tables
from tests.support.documents import (
    REFERENCE,
    ROOT,
    bare,
    chapters,
    code_blocks,
    read,
    table,
    tables,
)
from tests.unit.cli.test_arguments import PARSERS
from tests.unit.kube.test_migration_log import play


class _Everything(Mapping[str, Any]):
    """A mapping that has itself as the value of every key. No setting accepts this value."""

    def get(self, key: str, default: object = None) -> Any:
        """Return the mapping itself, which is a wrong value for every setting."""
        del key, default
        return self

    def __getitem__(self, key: str) -> Any:
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "everything"


def every_key() -> list[str]:
    """The dotted path of every setting, from the errors that `_Everything` causes."""
    with pytest.raises(InvalidSettings) as refused:
        read_settings(_Everything())
    return [fault.split(":")[0] for fault in refused.value.faults]


def nested(rows: Mapping[str, object]) -> dict[str, Any]:
    """Nest dotted keys, as in a configuration file."""
    document: dict[str, Any] = {}
    for key, value in rows.items():
        *sections, last = key.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return document


def test_every_setting_has_its_row() -> None:
    """The table of settings has every key once."""
    assert sorted(bare(row[0]) for row in table(REFERENCE, "Settings")) == sorted(every_key())


def test_the_memory_limit_is_the_sum_of_its_parts() -> None:
    """The manifests' memory limit is the sum of the table's rows. The first row is `BUDGET`."""
    (deployment,) = yaml.safe_load_all(read(ROOT / "deploy/base/deployment.yaml"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    parts = [int(row[0]) for row in table(REFERENCE, "What callers may hold")]

    assert parts[0] * 2**20 == BUDGET
    assert f"{sum(parts)}Mi" == container["resources"]["limits"]["memory"]


TLS_FILES = ("certFile", "keyFile", "clientCAFile")


def test_the_defaults_are_the_program_s() -> None:
    """A file with all defaults of the table has the same result as no file."""
    rows = {bare(row[0]): yaml.safe_load(bare(row[1])) for row in table(REFERENCE, "Settings")}

    assert replace(read_settings(nested(rows)), remarks=()) == Settings()
    assert {key for key, value in rows.items() if value is None} == {
        "stuck.external",
        "listen.admission",
        "listen.local",
        "links.runbooks",
        "links.grafana",
        "links.console",
        "log.format",
        "evictionRequests.mode",
        *(f"tls.{port}.{file}" for port in ("query", "metrics", "admission") for file in TLS_FILES),
    }


def test_every_setting_is_explained() -> None:
    """Every row of the table of settings has a stability and a meaning."""
    for key, _, stability, meaning in table(REFERENCE, "Settings"):
        assert stability in [*Stability], key
        assert meaning, key


def test_the_examples_are_valid() -> None:
    """The program accepts every example of a configuration."""
    blocks = code_blocks(chapters(REFERENCE)["Settings"], "yaml")

    assert blocks
    for block in blocks:
        assert isinstance(read_settings(yaml.safe_load(block)), Settings)


@pytest.mark.parametrize("exception", ["never-move", "no-cooldown"])
def test_the_example_exempts_one_vm_of_the_databases(exception: str) -> None:
    """The label of one VM counts more than the namespace that the VM shares with others."""
    blocks = code_blocks(chapters(REFERENCE)["Settings"], "yaml")
    (block,) = (block for block in blocks if "overrides:" in block)
    policy = read_settings(yaml.safe_load(block)).policy

    assert policy.choose("db-1", {}, "") == "databases"
    assert policy.choose("db-1", {f"example.com/{exception}": "true"}, "") == exception


def test_the_generated_tables_are_the_program_s() -> None:
    """`make reference` would change no state, outcome, reason, exit code, metric or endpoint."""
    assert read(REFERENCE) == fill_tables(read(REFERENCE))
    assert len(table(REFERENCE, "Exit codes")) == len(Exit)
    assert len(table(REFERENCE, "Metrics")) == len(FAMILIES)
    assert len(table(REFERENCE, "Stability")) == len(ROUTES)


@pytest.mark.parametrize("row", [*FAMILIES, *ROUTES], ids=lambda row: row.name)
def test_nothing_has_a_stability_by_default(row: Family | Route) -> None:
    """A metric or an endpoint cannot be defined without a stability."""
    fields = structs.asdict(row)
    del fields["stability"]

    with pytest.raises(TypeError, match="stability"):
        type(row)(**fields)


def test_the_command_line_is_the_program_s() -> None:
    """Each command has a line, in order, with exactly the options of the command."""
    (usage,) = code_blocks(chapters(REFERENCE)["Command line"], "text")
    written: dict[str, set[str]] = {}
    for line in usage.splitlines():
        match = re.fullmatch(r"python -m exporter ?(\w*)(.*)", line)
        assert match is not None, line
        command, rest = match.groups()
        places = re.findall(
            r"(?:\[[A-Z]+/\])?[A-Z/]+", re.sub(r"\[--[^]]*\]|--[a-z-]+ \S+", "", rest)
        )
        written[command] = {*re.findall(r"--[a-z-]+", rest), *places}
    taken = {
        command: {
            action.option_strings[-1] if action.option_strings else str(action.metavar)
            for action in parser._actions  # noqa: SLF001 (argparse lists them nowhere else)
        }
        - {"--help", "--version", "COMMAND"}
        for command, parser in PARSERS.items()
    }

    assert written == taken
    assert list(written) == list(taken)


def test_the_alerts_are_the_rule_file_s() -> None:
    """The table of alerts has every alert with its `for` and its severity, in order."""
    rules = yaml.safe_load((ROOT / "alerts/rules.yaml").read_text(encoding="utf-8"))
    alerts = [
        [
            f"[`{rule['alert']}`](../exporter/runbooks/{rule['alert']}.md)",
            f"`{rule['for']}`",
            rule["labels"]["severity"],
        ]
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]

    assert [row[:3] for row in table(REFERENCE, "Alerts")] == alerts


def test_the_events_are_the_program_s() -> None:
    """The tables of Events have every Event with its type, and every outcome, in order."""
    reasons, outcomes = tables(REFERENCE, "Events")

    types = [(reason, kind) for reason, (kind, _) in TYPES_AND_ACTIONS.items()]
    assert [(bare(row[0]), bare(row[1])) for row in reasons] == types
    assert [reason for reason, _ in types] == list(EventReason)
    assert [bare(row[0]) for row in outcomes] == list(EventOutcome)


def test_the_limits_of_events_are_the_program_s() -> None:
    """The limits in the text are those of the queue of Events."""
    text = " ".join(chapters(REFERENCE)["Events"].split())

    assert (PER_VMI, PER_SECOND, REPEATED_AFTER) == (60.0, 1.0, 1800.0)
    assert f"{BURST} at once plus one a second" in text
    assert f"{BURST + 3600 * PER_SECOND:,.0f} in the hour" in text
    assert f"more than {MOST_BLOCKED:,} VMs" in text


def test_the_record_of_a_migration() -> None:
    """The tables have every field of `migration_ended` and every reason, in order."""
    _, fields, reasons = tables(REFERENCE, "Metrics")
    _, (line,) = play("success")
    assert [bare(row[0]) for row in fields] == [word for word in line if "." in word]
    assert [bare(row[0]) for row in reasons] == [*EndReason]
