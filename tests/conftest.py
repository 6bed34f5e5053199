"""What several test files share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a quick demo on scikit-learn's digits writes."""
    from regauge.cli.main import main

    folder = tmp_path_factory.mktemp("demo")
    main(["demo", "--quick", "--data", "digits", "--out", str(folder)])
    return folder
