"""Versions agree, and addresses of the project are written in one place."""

import re
import tomllib
from pathlib import Path

import yaml

from regauge.names import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAPERS = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert VERSION == PROJECT["project"]["version"] == PAPERS["version"] == citation["version"]
    assert f"regauge[shapes]=={VERSION}" in PAPERS["dependencies"]
    assert re.search(rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_links_of_the_readme_lead_to_the_address_of_the_source() -> None:
    (rule,) = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = re.sub(rule["pattern"], rule["replacement"], (ROOT / "README.md").read_text(encoding="utf-8"))
    source = PROJECT["project"]["urls"]["Source"]
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20
    assert all(target.startswith(("#", source, "https://")) for target in targets)
    places = [
        path for path in (ROOT / "src").rglob("*.py") if "example.org/regauge" in path.read_text(encoding="utf-8")
    ]
    assert places == []


def test_the_workflow_calls_what_ci_runs() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["check"]["steps"]
    assert "sh .ci/run" in [step.get("run") for step in steps]
    assert all(yaml.safe_load(path.read_text())["body"] for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
