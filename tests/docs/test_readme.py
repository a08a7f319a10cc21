"""The README's tables are true: each has the rows that the program has, no more and no less."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.cli.commands import EXIT_MEANINGS
from exporter.engine.diagnosis import State
from exporter.engine.model import Reason
from exporter.engine.rules import RULES
from exporter.metrics.exposition import FAMILIES
from exporter.server.schemas import ROUTES
from exporter.settings import InvalidSettings, Settings, read_settings
from tests.generate.rules import all_alerts, load_groups
from tests.unit.cli.test_arguments import PARSERS


README = Path(__file__).parents[2] / "README.md"
DEPLOYING = README.parent / "deploy" / "README.md"
PLUGIN = README.parent / "deploy" / "descheduler" / "verdicts"


def chapter(heading: str, file: Path = README) -> str:
    """The text below a heading, to the next one."""
    text = file.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{file} has no heading ## {heading}"
    return found[1]


def table(heading: str, file: Path = README) -> list[list[str]]:
    """The cells of the table below a heading, its head left out."""
    rows = [line for line in chapter(heading, file).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    assert set("".join(cells[1])) <= set("-:"), f"the table of ## {heading} has no head"
    return cells[2:]


def bare(cell: str) -> str:
    """What stands in a cell's backticks."""
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found is not None, f"{cell!r} is not one word in backticks"
    return found[1]


class _Everything(Mapping[str, Any]):
    """A mapping that has every key, each with a value that is wrong everywhere: itself."""

    def get(self, key: str, default: object = None) -> Any:
        """The wrong value."""
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
    """The dotted path of every setting that is read, told by what is wrong with each."""
    with pytest.raises(InvalidSettings) as refused:
        read_settings(_Everything())
    return [fault.split(":")[0] for fault in refused.value.faults]


def nested(rows: Mapping[str, object]) -> dict[str, Any]:
    """Dotted keys as the document that they stand for."""
    document: dict[str, Any] = {}
    for key, value in rows.items():
        *sections, last = key.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return document


def test_every_setting_has_its_row() -> None:
    """The settings' table has every key once."""
    assert sorted(bare(row[0]) for row in table("Settings")) == sorted(every_key())


def test_every_failure_is_shown_by_a_test() -> None:
    """Each row names tests that there are, and metrics and alerts that there are."""
    sources = "\n".join(path.read_text() for path in (README.parent / "tests").rglob("test_*.py"))
    families = {family.name for family in FAMILIES}
    for row in table("When something fails"):
        names = re.findall(r"`(test_\w+)`", row[3])
        assert names, row[0]
        for name in names:
            assert f"def {name}(" in sources
        for metric in re.findall(r"`…(_\w+)", row[1]):
            assert f"kubevirt_eviction_exporter{metric}" in families
        for alert in re.findall(r"`(KubeVirt\w+)`", row[1]):
            assert alert in all_alerts(load_groups())


def test_what_is_odd_is_told_by_words_of_the_program() -> None:
    """Each symptom names events that are logged, metrics and exit codes that there are."""
    sources = "\n".join(path.read_text() for path in (README.parent / "exporter").rglob("*.py"))
    families = {family.name for family in FAMILIES}
    rows = table("When something is odd")

    assert rows
    for seen, events, metrics, meaning, cure in rows:
        assert meaning
        assert cure
        for event in re.findall(r"`([a-z_]+)`", events):
            assert f'"{event}"' in sources, event
        for metric in re.findall(r"`((?:…|kubevirt|descheduler)_\w+)`", metrics):
            assert metric.replace("…", "kubevirt_eviction_exporter") in families, metric
        for code in re.findall(r"exit (\d)", seen + events):
            assert int(code) in list(EXIT_MEANINGS)


def test_what_is_asked_of_a_new_installation_can_be() -> None:
    """Each question's metrics are the program's."""
    families = {family.name for family in FAMILIES}
    text = "\n".join("|".join(row) for row in table("See that it works"))
    named = set(re.findall(r"\b(kubevirt_eviction_exporter_\w+?)(?:_count)?\b", text))

    assert named
    assert named <= families


@pytest.mark.parametrize("file", [README, DEPLOYING], ids=["README", "deploy"])
def test_every_link_leads_somewhere(file: Path) -> None:
    """The files that are linked are there, and so are the headings in them."""
    links = re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8"))
    own = [link for link in links if "://" not in link]

    assert own
    for link in own:
        path, _, anchor = link.partition("#")
        target = file if not path else (file.parent / path).resolve()
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, link


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


TLS_FILES = ("certFile", "keyFile", "clientCAFile")


def test_the_plugin_s_arguments_are_those_of_its_types() -> None:
    """Each argument of the Go types has its row, in their order, and nothing else has."""
    source = (PLUGIN / "types.go").read_text(encoding="utf-8")
    outer, _, inner = source.partition("type TLSConfig struct")
    names = re.findall(r'json:"(\w+)', outer), re.findall(r'json:"(\w+)', inner)
    told = [bare(row[0]) for row in table("The plugin's arguments", DEPLOYING)]

    assert sorted(told) == sorted(
        [*(n for n in names[0] if n != "tlsConfig"), *(f"tlsConfig.{n}" for n in names[1])]
    )


def test_the_plugin_s_metrics_are_those_that_it_registers() -> None:
    """Each is named with its labels."""
    source = (PLUGIN / "metrics.go").read_text(encoding="utf-8")
    registered = re.findall(
        r'NewDesc\(\s*"(\w+)",.*?(?:\[\]string\{([^}]*)\}|nil), nil, metrics', source, re.DOTALL
    )
    told = chapter("The plugin's arguments", DEPLOYING)
    assert len(registered) == 3
    for name, labels in registered:
        joined = ",".join(re.findall(r"\w+", labels))
        assert f"`{name}{{{joined}}}`" in told if joined else f"`{name}`" in told


def test_the_defaults_are_the_program_s() -> None:
    """A file with every default of the table written out is the same as none."""
    rows = {bare(row[0]): yaml.safe_load(bare(row[1])) for row in table("Settings")}

    assert replace(read_settings(nested(rows)), remarks=()) == Settings()
    assert {key for key, value in rows.items() if value is None} == {
        "stuck.external",
        "listen.admission",
        "log.format",
        "auth.socketGroup",
        *(f"tls.{one}.{file}" for one in ("query", "metrics", "admission") for file in TLS_FILES),
    }


def test_every_setting_is_explained() -> None:
    """No row is without a meaning."""
    assert all(len(row) == 3 and row[2] for row in table("Settings"))


def test_the_examples_are_valid() -> None:
    """Every configuration that the README shows is one that the program takes."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", chapter("Settings"), re.DOTALL | re.MULTILINE)

    assert blocks
    for block in blocks:
        assert isinstance(read_settings(yaml.safe_load(block)), Settings)


def test_the_metrics_are_the_program_s() -> None:
    """The metrics' table has every family with its type, labels and help, in order."""
    families = [
        [
            f"`{family.name}`",
            family.type,
            ", ".join(f"`{label}`" for label in family.labels) or "none",
            family.help,
        ]
        for family in FAMILIES
    ]

    assert table("Metrics") == families


def test_the_exit_codes_are_the_program_s() -> None:
    """The exit codes' table has every code with its meaning, in order."""
    codes = [[f"`{code.value}`", meaning] for code, meaning in EXIT_MEANINGS.items()]

    assert table("Exit codes") == codes


def test_the_command_line_is_the_program_s() -> None:
    """Each command has its line, in order, with every option that it takes and no other."""
    usage = re.search(r"^```text\n(.*?)^```", chapter("Command line"), re.DOTALL | re.MULTILINE)
    assert usage is not None
    told: dict[str, set[str]] = {}
    for line in usage[1].splitlines():
        found = re.fullmatch(r"python -m exporter ?(\w*)(.*)", line)
        assert found is not None, line
        command, rest = found.groups()
        places = re.findall(r"[A-Z/]+", re.sub(r"\[--[^]]*\]|--[a-z-]+ \S+", "", rest))
        told[command] = {*re.findall(r"--[a-z-]+", rest), *places}
    taken = {
        command: {
            action.option_strings[-1] if action.option_strings else str(action.metavar)
            for action in parser._actions  # noqa: SLF001 (argparse lists them nowhere else)
        }
        - {"--help", "--version", "COMMAND"}
        for command, parser in PARSERS.items()
    }

    assert told == taken
    assert list(told) == list(taken)


def test_the_endpoints_are_the_program_s() -> None:
    """The endpoints' table has every route with its summary, in order."""
    routes = [[f"`{route.method} {route.path}`", route.summary] for route in ROUTES]

    assert table("Query API") == routes


def test_the_states_are_the_program_s() -> None:
    """The states' table has every state of an evacuation, in their order."""
    assert [bare(row[0]) for row in table("Evacuation states")] == list(State)


def test_the_alerts_are_the_rule_file_s() -> None:
    """The alerts' table has every alert with its for and its severity, in order."""
    rules = yaml.safe_load((README.parent / "alerts/rules.yaml").read_text(encoding="utf-8"))
    alerts = [
        [
            f"[`{rule['alert']}`](alerts/runbooks/{rule['alert']}.md)",
            f"`{rule['for']}`",
            rule["labels"]["severity"],
        ]
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]

    assert [row[:3] for row in table("Alerts and dashboards")] == alerts


def test_the_reasons_are_the_program_s() -> None:
    """The reasons' table has every reason with the checkpoint of its rules."""
    told = {bare(row[0]): bare(row[1]) for row in table("Reasons")}

    assert told == {str(rule.reason): str(rule.checkpoint) for rule in RULES}
    assert list(told) == list(Reason)
