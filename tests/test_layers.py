"""Imports point in one direction: each layer imports only from layers above it, and siblings do not import each
other.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import regauge

SOURCE = Path(regauge.__file__).parent
LAYERS: tuple[tuple[str, ...], ...] = (
    ("names",),
    ("core",),
    ("relaxed",),
    ("checkpoints",),
    ("storage",),
    ("discovery",),
    ("hub",),
    ("training",),
    ("alignment",),
    ("canonical",),
    ("gauging", "pruning"),
    ("connect",),
    ("merging",),
    ("comparison",),
    ("data", "nets"),
    ("zoo",),
    ("weightspace",),
    ("bayes", "inr"),
    ("learn",),
    ("flow",),
    ("report",),
    ("cli",),
)
"""The layers of the design. A part may import itself and the parts in earlier rows."""

UPWARD = {
    "comparison/comparison_report.py": {"regauge.report.comparison_page"},
    "connect/line.py": {"regauge.report.line_figures"},
    "bayes/chains.py": {"regauge.report.chain_figures"},
    "alignment/result.py": {"regauge.report.alignment_figures"},
    "core/symmetry.py": {"regauge.report.thread_figures"},
}
"""Files that draw a result or write its page, and the single import from layers above that their functions may have."""

PURE = {
    "core": {"jaxtyping", "torch", "scipy", "numpy"},
    "discovery": {"torch", "numpy", "scipy"},
    "relaxed": {"jaxtyping", "torch", "scipy", "numpy"},
    "training": {"torch", "numpy"},
    "alignment": {"jaxtyping", "torch", "scipy", "numpy", "lap", "typing_extensions"},
    "canonical": {"jaxtyping", "torch", "scipy", "numpy"},
    "gauging": {"jaxtyping", "torch", "scipy"},
    "pruning": {"jaxtyping", "torch"},
    "connect": {"torch", "numpy", "scipy"},
    "merging": {"torch", "numpy", "scipy", "safetensors", "yaml"},
    "comparison": {"jaxtyping", "torch", "numpy", "scipy"},
}
"""Packages that need few dependencies other than torch."""

BEFORE_PARSING = (
    "alignment/table.py",
    "merging/table.py",
    "checkpoints/formats/file_formats.py",
    "__init__.py",
    "__main__.py",
    "names.py",
    "cli/__init__.py",
    "cli/main.py",
    "cli/align_options.py",
    "cli/line_options.py",
    "cli/options.py",
    "cli/config_options.py",
    "cli/store_options.py",
    "cli/zoo_options.py",
    "cli/zoo_population_options.py",
    "cli/commands.py",
    "cli/checkpoint_options.py",
    "cli/compare_options.py",
    "cli/early.py",
    "cli/inr_options.py",
    "cli/flow_options.py",
    "cli/gauge_options.py",
    "cli/prune_options.py",
    "cli/learn_options.py",
    "cli/trained_net_options.py",
    "alignment/__init__.py",
    "alignment/table.py",
    "merging/__init__.py",
    "merging/table.py",
    "inr/__init__.py",
    "inr/fit_config.py",
    "learn/__init__.py",
    "learn/learn_configs.py",
    "flow/__init__.py",
    "flow/flow_config.py",
    "flow/representation.py",
    "training/__init__.py",
    "training/training_configs.py",
    "training/schedules.py",
)
"""Modules that `regauge --help` imports."""

LEVEL = {part: level for level, row in enumerate(LAYERS) for part in row}
FILES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Return the dotted names that a file imports, without type-checking blocks and, optionally, without functions."""
    names: list[str] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not everywhere:
                continue
            if isinstance(child, ast.Import):
                names.extend(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import; write the full name"
                assert child.module is not None
                names.append(child.module)
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    yield from names


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in FILES if path.parent != SOURCE}
    assert parts <= LEVEL.keys()
    assert {"core", "discovery", "alignment", "cli"} <= parts


def test_imports_point_one_way() -> None:
    wrong = []
    for path in FILES:
        if path.parent == SOURCE:
            continue
        part = part_of(path)
        allowed = UPWARD.get(str(path.relative_to(SOURCE)), set()) - {*imported(path, everywhere=False)}
        for name in imported(path):
            if name.startswith("regauge."):
                other = name.split(".")[1]
                if other != part and LEVEL[other] >= LEVEL[part] and name not in allowed:
                    wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
            elif name == "regauge" and LEVEL[part] < LEVEL["report"]:
                wrong.append(f"{path.relative_to(SOURCE)} imports the whole package")
    assert not wrong


def test_no_package_has_a_circle() -> None:
    """Imports for type checkers and imports inside of functions count, too."""
    modules = {}
    for path in FILES:
        parts = ("regauge", *path.relative_to(SOURCE).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph.setdefault(module, set()).update(name if name in modules else node.module for name in names)
            elif isinstance(node, ast.Import):
                graph.setdefault(module, set()).update(alias.name for alias in node.names)
    TopologicalSorter(graph).prepare()


def test_the_library_proper_needs_little() -> None:
    wrong = []
    for path in FILES:
        allowed = PURE.get(part_of(path))
        if allowed is None or path.parent == SOURCE:
            continue
        for name in imported(path):
            top = name.split(".")[0]
            if top != "regauge" and top not in sys.stdlib_module_names and top not in allowed:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_core_touches_no_files() -> None:
    forbidden = {"os", "pathlib", "shutil", "tempfile", "io"}
    wrong = [
        f"{path.name} imports {name}"
        for path in (SOURCE / "core").glob("*.py")
        for name in imported(path)
        if name.split(".")[0] in forbidden and (path.name, name) != ("products.py", "os")
    ]
    assert not wrong
    # The environment may name the library of matrix products, which no file is read for.
    products = (SOURCE / "core" / "products.py").read_text(encoding="utf-8")
    assert [line for line in products.splitlines() if "os" in line.split() and "import" in line] == [
        "from os import environ"
    ]


@pytest.mark.parametrize("name", BEFORE_PARSING)
def test_nothing_heavy_before_parsing(name: str) -> None:
    light = {"regauge", "tyro", "lazy_loader"}
    for module in imported(SOURCE / name, everywhere=False):
        top = module.split(".")[0]
        assert top in light or top in sys.stdlib_module_names
        if top == "regauge":
            assert module in {
                "regauge",
                "regauge.names",
                "regauge.core.escaping",
                "regauge.alignment",
                "regauge.merging",
                "regauge.cli.main",
                "regauge.cli.config_options",
                "regauge.learn.learn_configs",
                "regauge.flow",
                "regauge.flow.representation",
                "regauge.inr.fit_config",
                "regauge.training.training_configs",
                "regauge.training.schedules",
                "regauge.cli.align_options",
                "regauge.cli.line_options",
                "regauge.cli.options",
                "regauge.cli.store_options",
                "regauge.cli.zoo_options",
                "regauge.cli.zoo_population_options",
                "regauge.cli.commands",
                "regauge.cli.checkpoint_options",
                "regauge.cli.compare_options",
                "regauge.cli.early",
                "regauge.cli.flow_options",
                "regauge.cli.gauge_options",
                "regauge.cli.prune_options",
                "regauge.cli.inr_options",
                "regauge.cli.learn_options",
                "regauge.cli.trained_net_options",
                "regauge.checkpoints.location",
                "regauge.checkpoints.formats.file_formats",
                "regauge.checkpoints.plain_files",
            }


@pytest.mark.parametrize("args", [["--help"], ["demo", "--help"], ["align", "--help"]])
def test_help_does_not_load_torch(args: list[str]) -> None:
    code = (
        "import sys\n"
        "from regauge.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'sklearn', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: regauge" in done.stdout


@pytest.mark.parametrize("command", ["align", "merge"])
def test_merging_imports_no_applications(command: str) -> None:
    code = (
        f"import sys\nimport regauge.cli.{command}\n"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('regauge.')}\n"
        "assert not parts & {'inr', 'bayes', 'zoo', 'report', 'nets', 'weightspace', 'learn'}, parts\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tests_import_from_no_other_tests() -> None:
    """Code that several test files share is in separate files, such as `symmetries.py` and `models.py`."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    wrong = [f"{path.name} imports {name}" for path in files for name in imported(path) if name.startswith("test_")]
    assert not wrong
