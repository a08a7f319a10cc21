"""The words for people: each value of the engine that people see has its texts in one row here.

The commands, the page, the webhook, the Events, `replay`, the OpenAPI document and the tables of
docs/reference.md take their texts from these tables. `tests/unit/words` checks that each table has
every value.
"""

from enum import StrEnum


class Stability(StrEnum):
    """How much operators may rely on a metric or an endpoint; docs/reference.md says more."""

    STABLE = "stable"
    EXPERIMENTAL = "experimental"
