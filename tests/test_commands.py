"""The front door of the command line: names of commands, the version, help, and what is refused before torch loads."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from regauge.cli.commands import _by_name
from regauge.cli.main import Command, main
from regauge.names import VERSION


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
        (["align", "a", "b", "--method", "sinkhorm"], "--method 'sinkhorm' is no choice; did you mean 'sinkhorn'?"),
        (["merge", "a", "b", "--rule", "tie"], "--rule 'tie' is no choice; did you mean 'ties'?"),
        (["learn", "predictor", "s", "--kind", "zzzz"], "--kind 'zzzz' is no choice; there are numbers, fractions"),
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
        (["align", "a", "b", "--outptu", "x"], "'regauge align' has no option --outptu; did you mean --output?"),
        (["line", "a", "b", "--zzz"], "has no option --zzz; regauge line --help lists those that it has"),
    ],
)
def test_an_option_that_a_command_lacks_is_told_those_that_it_has(
    words: list[str], sentence: str, refused: Callable[..., str]
) -> None:
    assert sentence in refused(*words)


def _commands() -> list[list[str]]:
    found = []
    for name, options in _by_name(Command).items():
        inner = options.__dataclass_fields__.get("command")
        found += [[name]] if inner is None else [[name, one] for one in _by_name(inner.type)]
    return found


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_help_names_no_defaults_that_say_nothing(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "options" in text
    for nothing in ("(default: )", "(default: None)", "(default: False)", "(default: '')"):
        assert nothing not in text


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
