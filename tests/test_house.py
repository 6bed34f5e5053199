"""Counts that keep the code maintainable. Each count has a bound, the last measured value, and a goal.

A bound is lowered together with its count, in the same commit. If a bound is raised, the commit message states the
reason. Counts are computed from syntax trees, so moving lines does not change them.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import FILES, PUBLIC, module_of, nodes, public_names, tree_of

CLI = [path for path in FILES if path.parts[0] == "cli"]

DEEP_IMPORTS = 54  # goal: 60
PUBLIC_NAMES = 480  # goal: 480
CLI_LINES = 4984  # goal: 5,000
CLI_FILE_LINES = 196  # goal: 200
REPEATED_CLASSES = 16  # goal: 20
REPEATED_FILES = 8  # goal: 15
RIDDLES = 0  # goal: 120
CODE_LINES = 70499  # goal: 49,000

RIDDLE = {"What", "How", "Those", "Of", "That", "As", "Which", "Where"}
"""First words of docstrings that do not state what a thing is or does. "The same" is another example."""


MODULES = {module_of(path): path for path in FILES}


def at_most(bound: int, found: list[str], what: str) -> None:
    """Fail with the number and the offenders, the worst first."""
    assert len(found) <= bound, "\n".join([f"{len(found)} {what}, at most {bound}:", *found[:40]])


def lines_of(paths: list[Path]) -> dict[Path, int]:
    """Return the numbers of lines of files, the longest file first."""
    return dict(sorted(((path, FILES[path].count("\n")) for path in paths), key=lambda one: -one[1]))


def deep_imports(path: Path) -> Iterator[str]:
    """Yield names below a public package that a file imports from outside cli/, by any import statement or by dots."""
    aliases = {"regauge": "regauge"}
    for node in ast.walk(tree_of(path)):
        names, is_module = [], True
        if isinstance(node, ast.ImportFrom):
            package = node.module or ""
            aliases |= {one.asname or one.name: f"{package}.{one.name}" for one in node.names if package == "regauge"}
            is_deep = package.count(".") > 1
            is_module = is_deep
            names = [package] if is_deep else [f"{package}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
            aliases |= {one.asname: one.name for one in node.names if one.asname and one.name.startswith("regauge")}
        for name in names:
            is_public = name in PUBLIC and not is_module  # A function with the name of its file.
            if name.count(".") > 1 and name in MODULES and not is_public and not name.startswith("regauge.cli."):
                yield f"cli/{path.name}:{node.lineno} {name}"  # type: ignore[attr-defined]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain, inner = [inner.attr, *chain], inner.value
            if isinstance(inner, ast.Name) and inner.id in aliases:
                name = ".".join([aliases[inner.id], *chain])
                if (
                    name.count(".") > 1
                    and name in MODULES
                    and name not in PUBLIC
                    and not name.startswith("regauge.cli.")
                ):
                    yield f"cli/{path.name}:{node.lineno} {name}"


def without_words(path: Path) -> int:
    """Return the number of code lines of a file, without blank lines, comments and docstrings."""
    words, texts = set[int](), set[int]()
    for node in nodes()[path]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr):  # Blank lines within a text are code.
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(FILES[path].split("\n"), 1)
    code = {number for number, line in lines if line.strip() and not line.lstrip().startswith("#")}
    return len((code | texts) - words)


def test_the_wheel_has_no_papers() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/regauge"]}
    assert not [path for path in FILES if path.parts[0] == "papers"]
    assert not [path for path, text in FILES.items() if re.search(r"^\s*(from|import) regauge_papers", text, re.M)]


def test_commands_import_from_the_front_doors() -> None:
    found = [one for path in CLI for one in deep_imports(path)]
    number = {path.name: sum(one.startswith(f"cli/{path.name}:") for one in found) for path in CLI}
    found.sort(key=lambda one: -number[one.partition(":")[0].removeprefix("cli/")])
    at_most(DEEP_IMPORTS, found, "imports in cli/ from below a public package")


def test_public_names_are_few() -> None:
    at_most(PUBLIC_NAMES, list(public_names()), "public names")


def test_commands_are_thin() -> None:
    lines = lines_of(CLI)
    table = "\n".join(f"{number} cli/{path.name}" for path, number in [*lines.items()][:15])
    assert sum(lines.values()) <= CLI_LINES, f"{sum(lines.values())} lines in cli/, at most {CLI_LINES}:\n{table}"
    assert max(lines.values()) <= CLI_FILE_LINES, f"a file of cli/ has more than {CLI_FILE_LINES} lines:\n{table}"


def test_class_names_stand_once() -> None:
    where = defaultdict(list)
    for path, every in nodes().items():
        for node in every:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(f"{path}:{node.lineno}")
    twice = sorted((one for one in where.items() if len(one[1]) > 1), key=lambda one: (-len(one[1]), one[0]))
    at_most(REPEATED_CLASSES, [f"{name}: {', '.join(places)}" for name, places in twice], "class names stand twice")


def test_file_names_stand_once() -> None:
    where = defaultdict(list)
    for path in FILES:
        if path.parts[0] != "cli" and path.name != "__init__.py":
            where[path.name].append(str(path.parent))
    twice = sorted((one for one in where.items() if len(one[1]) > 1), key=lambda one: (-len(one[1]), one[0]))
    at_most(REPEATED_FILES, [f"{name}: {', '.join(places)}" for name, places in twice], "file names stand twice")


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    found = []
    papers = Path(__file__).parents[1] / "papers" / "src"
    others = {
        path.relative_to(papers): ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(papers.rglob("*.py"))
    }
    assert others
    for path, every in [*nodes().items(), *others.items()]:
        for node in every:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words and (words[0].rstrip(",.:;") in RIDDLE or words[:2] == ["The", "same"]):
                    line = 1 if isinstance(node, ast.Module) else node.lineno
                    found.append(f"{path}:{line} {' '.join(words[:12])}")
    at_most(RIDDLES, found, "docstrings begin with a riddle")


def test_there_is_little_code() -> None:
    lines: dict[str, int] = defaultdict(int)
    for path in FILES:
        lines[path.parts[0]] += without_words(path)
    table = "\n".join(f"{number} {part}" for part, number in sorted(lines.items(), key=lambda one: -one[1]))
    assert sum(lines.values()) <= CODE_LINES, f"{sum(lines.values())} lines of code, at most {CODE_LINES}:\n{table}"


NEW_IN_NUMPY_2 = {"bool", "long", "ulong", "astype", "concat", "permute_dims", "matrix_transpose", "vecdot", "isdtype"}
"""Names that the oldest numpy of pyproject.toml lacks. Annotations of functions count, too."""


def test_the_oldest_numpy_has_every_name() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "numpy>=1.26" in project["project"]["dependencies"]
    found = [
        f"{path}:{node.lineno} np.{node.attr}"
        for path, every in nodes().items()
        for node in every
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in {"np", "numpy"} and node.attr in NEW_IN_NUMPY_2
    ]
    at_most(0, found, "names that are new in numpy 2")


NET = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)), (torch.ones(2, 4),)
"""
MERGE = """
from regauge.cli.main import main as call

arguments = [["merge", "a.pt", "b.pt", "--model", "net.py:make", "-o", "out.safetensors"]]
"""
NETWORKS = """
import net
import regauge as rg

arguments = rg.load("a.pt"), rg.load("b.pt"), rg.discover(*net.make())
"""
WATCH = """
import json, os, sys, threading
from pathlib import Path
import torch
import net, regauge

source, entered, here = str(Path(regauge.__file__).parent), set(), threading.local()

def leave(frame, event, argument):
    here.importing -= event == "return"
    return leave

def watch(frame, event, argument):
    code = frame.f_code
    if code.co_name == "<module>":
        here.importing, frame.f_trace_lines = getattr(here, "importing", 0) + 1, False
        return leave
    if not getattr(here, "importing", 0) and code.co_filename.startswith(source):
        entered.add(code.co_filename[len(source) + 1 :])

torch.manual_seed(0)
[torch.save(net.make()[0].state_dict(), name) for name in ("a.pt", "b.pt")]
torch.export.export(*net.make())
for name, prepare in json.loads(sys.argv[1]).items():
    process = os.fork()
    if process == 0:
        exec(prepare)
        threading.settrace(watch)
        sys.settrace(watch)
        call(*arguments)
        sys.settrace(None)
        Path(f"{name}.txt").write_text("\\n".join(sorted(entered)))
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, name
"""
"""A program that runs calls and writes the files that each call enters. Each call runs in a fork of a process that has
imported the dependencies but has called nothing of regauge. Code that runs during imports is not counted."""

WAYS = {
    "regauge merge": (MERGE, "cli/main.py", 80),  # goal: 80
    "rg.align": (f"{NETWORKS}call = rg.align", "alignment/align_networks.py", 31),  # goal: 20
    "rg.compare": (f"{NETWORKS}call = rg.compare", "comparison/compare_networks.py", 51),  # goal: 20
}
"""For each call, its preparation, the file in which it begins, and the largest number of files that it may enter."""


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the calls ran, with one file for each call that lists the entered files."""
    folder = tmp_path_factory.mktemp("ways")
    (folder / "net.py").write_text(NET, encoding="utf-8")
    calls = json.dumps({name: prepare for name, (prepare, _, _) in WAYS.items()})
    done = subprocess.run([sys.executable, "-c", WATCH, calls], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "out.safetensors").exists()
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", WAYS)
def test_ways_are_short(name: str, ways: Path) -> None:
    _, first, bound = WAYS[name]
    entered = (ways / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert first in entered
    at_most(bound, [one for one in entered if not one.startswith("discovery/")], f"files on the way of {name}")
