"""What several test files share."""

import os
import tempfile
from pathlib import Path

import pytest

# Tests read data sets from REGAUGE_DATA alone: what a user once downloaded must not change what they do.
os.environ["REGAUGE_OFFLINE"] = "1"
os.environ["REGAUGE_CACHE"] = str(Path(tempfile.gettempdir()) / "regauge-tests-have-no-cache")


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a quick demo on scikit-learn's digits writes."""
    from regauge.cli.main import main

    folder = tmp_path_factory.mktemp("demo")
    main(["demo", "--quick", "--data", "digits", "--out", str(folder)])
    return folder
