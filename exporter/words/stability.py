"""How much operators may rely on a metric or an endpoint; docs/reference.md says what is meant."""

from enum import StrEnum


class Stability(StrEnum):
    """Whether a metric or an endpoint stays as it is."""

    STABLE = "stable"
    EXPERIMENTAL = "experimental"
