"""Where cases of a law run: those that are thorough in `make thorough`, all others in `make test`."""

from typing import Any

import pytest


def thorough(case: Any) -> Any:
    """A case much like others of its law."""
    return pytest.param(case, marks=pytest.mark.thorough)
