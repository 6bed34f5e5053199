"""Where cases of a law run: those that are thorough in `make thorough`, all others in `make test`."""

from typing import Any

import pytest


def thorough(case: Any) -> Any:
    """A case much like others of its law: a value, or a tuple of values of several parameters."""
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.thorough)
