"""The entry of the command line: names of commands, the version, help, and refusals before torch is imported."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from regauge.cli.command_help import FEW, GROUPS, ORDER, Option, options_in_groups, options_of
from regauge.cli.commands import commands_by_name, named_command
from regauge.cli.main import Command, main
from regauge.names import VERSION, documentation

HELPS = ("--help", "--help-all")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"regauge {VERSION}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["algin", "a", "b"], "there is no command 'regauge algin'; did you mean 'regauge align'?"),
        (["zoo", "trian"], "there is no command 'regauge zoo trian'; did you mean 'regauge zoo train'?"),
        (["xyz"], "there is no command 'regauge xyz'; there are demo, discover, align,"),
    ],
)
def test_unknown_commands_are_named_as_such(words: list[str], sentence: str, refused: Callable[..., str]) -> None:
    assert sentence in refused(*words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["align", "a", "b", "--method", "sinkhorm"], "--method 'sinkhorm' does not exist; did you mean 'sinkhorn'?"),
        (["merge", "a", "b", "--rule", "tie"], "--rule 'tie' does not exist; did you mean 'ties'?"),
        (["learn", "predictor", "s", "--kind", "zzzz"], "--kind 'zzzz' does not exist; choose from numbers, fractions"),
    ],
)
def test_a_value_that_is_no_choice_is_told_the_closest_one(
    words: list[str], sentence: str, refused: Callable[..., str]
) -> None:
    assert sentence in refused(*words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["learn", "predictor", "s", "--steps", "60"], "has no option --steps; it has --epochs and --seconds"),
        (["flow", "fit", "s", "--steps=60"], "has no option --steps; it has --epochs and --seconds"),
        (["line", "a", "b", "--input-shape", "2x3"], "'regauge line' has no option --input-shape; it has --data"),
        (["align", "a", "b", "--outptu", "x"], "'regauge align' has no option --outptu; did you mean '--output'?"),
        (["line", "a", "b", "--zzz"], "has no option --zzz; regauge line --help-all lists its options"),
    ],
)
def test_an_option_that_a_command_lacks_is_told_those_that_it_has(
    words: list[str], sentence: str, refused: Callable[..., str]
) -> None:
    assert sentence in refused(*words)


def _commands() -> list[list[str]]:
    found = []
    for name, options in commands_by_name(Command).items():
        inner = options.__dataclass_fields__.get("command")
        found += [[name]] if inner is None else [[name, one] for one in commands_by_name(inner.type)]
    return found


def printed_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    assert not stop.value.code
    return " ".join(re.sub(r"[│╭─╰╮╯]", " ", capsys.readouterr().out).split())


def flags_of(options: list[Option]) -> set[str]:
    return {f"--{one.name.replace('_', '-')}" for one in options}


@pytest.mark.parametrize("flag", HELPS)
@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_help_names_no_defaults_that_say_nothing(
    command: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed_help(capsys, *command, flag)
    assert "options" in text
    for nothing in ("(default: )", "(default: None)", "(default: False)", "(default: '')"):
        assert nothing not in text


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_help_shows_six_options_and_all_of_them_in_groups(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    groups = options_in_groups(named_command(command, Command)[1])
    options = [one for name, found in groups.items() for one in found if name]
    short, long = (set(re.findall(r"--[a-z-]+", printed_help(capsys, *command, flag))) for flag in HELPS)
    assert long >= flags_of(options)
    assert short >= flags_of([one for one in options if one.is_required])
    assert short >= flags_of(options) or (len(options) > FEW and "--help-all" in short)


def test_help_names_pages_of_the_documentation_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Every page that the help names exists. An installed package has no folder of pages."""
    text = " ".join(printed_help(capsys, *command, "--help-all") for command in _commands())
    pages = {*re.findall(r'page "(\w+)" of the documentation', text)}
    assert "docs/" not in text
    assert len(pages) > 5
    assert pages <= {path.stem for path in (Path(__file__).parents[1] / "docs").glob("*.md")}
    assert documentation() in printed_help(capsys, "--help")


def test_the_rest_of_the_options_is_one_flag_away(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = printed_help(capsys, "merge", "--help"), printed_help(capsys, "merge", "--help-all")
    for flag in ("--output", "--model", "--symmetry", "--data", "--base", "--rule"):
        assert f"{flag} " in short
    assert "--density" not in short
    assert "della-linear: the same" not in short
    assert "Show all 42 options" in short
    for group in GROUPS:
        assert f"{group} options" in long
    assert "--version" in printed_help(capsys, "--help")


def test_groups_and_order_name_options_that_there_are() -> None:
    known = {one.name for words in _commands() for one in options_of(named_command(words, Command)[1])}
    assert {*" ".join([ORDER, *GROUPS.values()]).split()} <= known


def test_no_help_loads_torch() -> None:
    code = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from regauge.cli.main import main\n"
        f"for command in {_commands()}:\n"
        "    with suppress(SystemExit):\n"
        "        main([*command, '--help'])\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'sklearn', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: regauge") == len(_commands())


def test_cheap_checks_come_before_torch(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    cases = [
        (["align", "a.safetensors", "b.safetensors", "-o", "c.safetensors"], "there is no checkpoint 'b.safetensors'"),
        (["align", "a.safetensors", "a.safetensors", "-o", "a.safetensors"], "'a.safetensors' exists already"),
        (["discover", "nets.py:model"], "there is no file 'nets.py'"),
        (["line", "a.safetensors", "a.safetensors", "--data", "x.npz"], "there is no data file 'x.npz'"),
        (
            ["align", "a.safetensors", "a.safetensors", "-o", "c", "--symmetry", "s.json"],
            "there is no symmetry 's.json'",
        ),
    ]
    code = f"""
import sys
from regauge.cli.main import main
for words, _ in {cases!r}:
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (_, sentence), line in zip(cases, done.stderr.splitlines(), strict=True):
        assert sentence in line


def test_extras_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setattr("regauge.cli.early.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text("{}")
    assert "pip install 'regauge[transformers]'" in refused("discover", str(tmp_path))
    assert "pip install 'regauge[dask]'" in refused(
        "zoo", "train", "uci-mlps", "-o", str(tmp_path / "z"), "--on", "dask"
    )
    raw = ["zoo", "import", "w.h5", "-o", str(tmp_path / "z"), "--format", "hdf5"]
    assert "pip install 'regauge[hdf5]'" in refused(*raw)
