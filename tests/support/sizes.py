"""The sizes of property tests."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings


Test = TypeVar("Test", bound=Callable[..., Any])


def soaked(examples: int) -> Callable[[Test], Test]:
    """A property test that `make soak` runs with this many examples."""

    def decorate(test: Test) -> Test:
        if not os.environ.get("SOAK"):
            return test
        sized: Test = pytest.mark.soak(settings(max_examples=examples)(test))
        return sized

    return decorate
