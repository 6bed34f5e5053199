"""Commands that other distributions add by entry points, and the project's own commands that are not installed."""

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import regauge as rg
from regauge.cli import commands
from regauge.cli.main import main
from regauge.names import VERSION

PAPERS = Path(__file__).parents[1] / "papers" / "pyproject.toml"
OPTIONS = '''
"""Options."""
from dataclasses import dataclass

@dataclass(frozen=True)
class Greet:
    """Say hello."""

    to: str = "you"
    """Whom."""
'''


@pytest.fixture
def found_anew() -> Iterator[None]:
    """Search the entry points again in the test and after the test."""
    commands.other_commands.cache_clear()
    yield
    commands.other_commands.cache_clear()


@pytest.mark.usefixtures("found_anew")
def test_a_distribution_adds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, about = tmp_path / "greeting", tmp_path / "greeting-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "options.py").write_text(OPTIONS)
    (package / "greet.py").write_text("def run(options):\n    print('hello,', options.to)\n")
    (about / "METADATA").write_text("Name: greeting\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[regauge.commands]\ngreet = greeting.options:Greet\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        main(["greet", "--to", "all"])
        assert capsys.readouterr().out == "hello, all\n"
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert not stop.value.code
        assert "Say hello." in capsys.readouterr().out
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "greeting"]:
            del sys.modules[name]


@pytest.mark.usefixtures("found_anew")
def test_what_is_not_installed_says_how_to_get_it(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: ())
    told = refused("reproduce", "001", "table1")
    assert "'regauge reproduce' is in a distribution of its own" in told
    assert "`pip install regauge-papers`" in told


def test_moved_names_say_which_distribution_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr("regauge.names.import_module", absent)
    with pytest.raises(ImportError, match=r"regauge\.weightspace\.ChainDWS is now in .* `pip install regauge-papers`"):
        rg.weightspace.ChainDWS  # noqa: B018


def test_the_papers_go_with_this_version() -> None:
    project = tomllib.loads(PAPERS.read_text(encoding="utf-8"))["project"]
    assert project["version"] == VERSION
    assert [text.partition("==")[2] for text in project["dependencies"]] == [VERSION]
