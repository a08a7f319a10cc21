"""Print the seed of each chaos test; pytest shows it if the test fails."""

import pytest

from tests.integration.chaos import SEED


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed, printed with every failure."""
    print(f"set CHAOS_SEED={SEED} to repeat this run")
    return SEED
