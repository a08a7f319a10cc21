"""The commands of the documents, to be typed."""

import re

from tests.e2e.terminal import Terminal
from tests.support.documents import (
    DEPLOY,
    HOLD_EVICTIONS,
    INSTALL,
    README,
    chapters,
    code_blocks,
    parts,
)


SECTIONS = {
    "Install": chapters(README)["Install"],
    **chapters(INSTALL),
    **chapters(DEPLOY),
    **chapters(HOLD_EVICTIONS),
    **parts(chapters(INSTALL)["In at most five lines"]),
}


def commands(section: str) -> list[str]:
    """The shell commands of a section, in order."""
    return [line for block in code_blocks(SECTIONS[section], "bash") for line in block.splitlines()]


def type_section(terminal: Terminal, section: str, *, without: str = "(?!)") -> dict[str, str]:
    """Type every command of a section but those that a pattern finds; what each printed."""
    return {
        command: terminal.type(command)
        for command in commands(section)
        if not re.search(without, command)
    }
