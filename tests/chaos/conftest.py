"""The seed that a failing chaos test prints first."""

import pytest

from tests.chaos import SEED


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed, printed with every failure."""
    print(f"CHAOS_SEED={SEED} repeats this")
    return SEED
