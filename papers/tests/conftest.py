"""Fixtures of the tests of the papers' experiments. The fixtures of all tests are at the root."""

import pytest


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide no data except the data in regauge, and no data that an earlier test has read."""
    from regauge_papers import populations

    monkeypatch.delenv("REGAUGE_DATA", raising=False)
    populations.images.cache_clear()
