"""The commands of the documents."""

import re

from tests.e2e.terminal import Terminal
from tests.support.documents import (
    DEPLOY,
    HOLD_EVICTIONS,
    INSTALL,
    OPERATE,
    chapters,
    code_blocks,
    ways_to_install,
)


CERTIFICATE = "A certificate first"
SECTIONS = {
    heading: text
    for document in (DEPLOY, HOLD_EVICTIONS, INSTALL, OPERATE)
    for heading, text in chapters(document).items()
}
WAYS = ways_to_install()


def commands(text: str) -> list[str]:
    """The shell commands in a part of a document, in order."""
    return [line for block in code_blocks(text, "bash") for line in block.splitlines()]


def type_section(terminal: Terminal, section: str, *, without: str = "(?!)") -> dict[str, str]:
    """Run every command of a section, except those that match a pattern."""
    return {
        command: terminal.type(command)
        for command in WAYS.get(section) or commands(SECTIONS[section])
        if not re.search(without, command)
    }
