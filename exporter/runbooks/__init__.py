"""The runbooks: a Markdown file for each alert, with the alert's name.

Below Mitigation, a step has a heading of the third level: the state, the obstacle or the cause to
which it belongs. NAME#STEP names a step, in answers and in URLs.
"""

import re
from pathlib import Path


FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.md")))
_STEP = re.compile(r"^(### (\w+)\n.*?)(?=^###? |\Z)", re.DOTALL | re.MULTILINE)


def read_runbook(reference: str) -> str:
    """The Markdown of the runbook NAME, or of the step NAME#STEP. Raises ValueError."""
    name, _, step = reference.partition("#")
    if name not in NAMES:
        raise ValueError(describe_unknown(name))
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    steps = {anchor: section for section, anchor in _STEP.findall(text)}
    if step and step not in steps:
        raise ValueError(f"{name} has no step {step!r}, only {', '.join(steps) or 'a whole text'}")
    return steps[step] if step else text


def describe_unknown(name: str) -> str:
    """A sentence with the names of all runbooks, for somebody who asked for an unknown one."""
    return f"no runbook {name!r}, only {', '.join(NAMES)}"
