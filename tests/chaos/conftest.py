"""What a chaos test that fails says first."""

import pytest

from tests.chaos import SEED


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed, told with every failure."""
    print(f"CHAOS_SEED={SEED} repeats this")
    return SEED
