"""deploy/README.md: the plugin's arguments and metrics are those of its Go code."""

import re

from tests.support.documents import DEPLOY, bare, chapters, table


PLUGIN = DEPLOY.parent / "descheduler" / "verdicts"


def test_the_plugin_s_arguments_are_those_of_its_types() -> None:
    """The rows of the table are exactly the arguments of the Go types."""
    source = (PLUGIN / "types.go").read_text(encoding="utf-8")
    outer, _, inner = source.partition("type TLSConfig struct")
    names = re.findall(r'json:"(\w+)', outer), re.findall(r'json:"(\w+)', inner)
    rows = [bare(row[0]) for row in table(DEPLOY, "The plugin's arguments")]

    assert sorted(rows) == sorted(
        [*(n for n in names[0] if n != "tlsConfig"), *(f"tlsConfig.{n}" for n in names[1])]
    )


def test_the_plugin_s_metrics_are_those_that_it_registers() -> None:
    """The text has each metric of the Go code with its labels."""
    source = (PLUGIN / "metrics.go").read_text(encoding="utf-8")
    registered = re.findall(
        r'NewDesc\(\s*"(\w+)",.*?(?:\[\]string\{([^}]*)\}|nil), nil, metrics', source, re.DOTALL
    )
    text = chapters(DEPLOY)["The plugin's arguments"]

    assert len(registered) == 3
    for name, labels in registered:
        joined = ",".join(re.findall(r"\w+", labels))
        assert f"`{name}{{{joined}}}`" in text if joined else f"`{name}`" in text
