"""Fixtures of the tests of the papers' experiments; those of all tests are at the root."""

import pytest


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data but what ships with regauge, and none that an earlier test has read."""
    from regauge_papers import populations

    monkeypatch.delenv("REGAUGE_DATA", raising=False)
    populations.images.cache_clear()
