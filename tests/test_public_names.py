"""The public interface: public names, their places, and the order of their arguments."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge as rg
from regauge.core.arguments import CHECKS, check_arguments
from regauge.names import nearest
from regauge.nets import initialize

SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (rg.discover, "module example_inputs example_kwargs *"),
    (rg.Symmetry.act, "element params"),
    (rg.Symmetry.compose, "left right"),
    (rg.Symmetry.inverse, "element"),
    (rg.Symmetry.random, "generator parts"),
    (rg.Symmetry.verify, "module example_inputs example_kwargs * generator"),
    (rg.Symmetry.from_axes, "axes * kinds"),
    (rg.align, "params_a params_b symmetry * method generator"),
    (rg.align_many, "params symmetry * method generator"),
    (rg.alignment.align_pairs, "params_a params_b symmetry * method generator"),
    (rg.line, "params_a params_b judge points *"),
    (rg.connect.plane, "params_a params_b params_c judge *"),
    (rg.repair, "params module endpoints batches *"),
    (rg.connect.reset_batchnorm, "params module batches"),
    (rg.connect.variance_collapse, "params module endpoints batches *"),
    (rg.connect.train_path, "params_a params_b task path * generator"),
    (rg.gauge, "params symmetry * method task generator"),
    (rg.prune, "params symmetry * share criterion task generator"),
    (rg.merge, "params symmetry * method weights"),
    (rg.canonicalize, "params symmetry *"),
    (rg.transport, "base_a tuned_a base_b symmetry * inputs task generator"),
    (rg.discovery.activations, "module example_inputs symmetry example_kwargs *"),
    (rg.discovery.nullity, "module example_inputs example_kwargs *"),
    (rg.discovery.fold, "params module example_inputs example_kwargs *"),
    (rg.gauging.certify, "params moves module example_inputs example_kwargs *"),
    (rg.gauging.audit, "table params symmetry module example_inputs example_kwargs * generator"),
    (rg.bayes.fit, "start module inputs targets config * generator"),
    (rg.bayes.predict, "posterior module batches *"),
    (rg.bayes.posterior_line, "q_a q_b module batches *"),
    (rg.bayes.posterior_slice, "first second third module batches *"),
    (rg.bayes.posterior_collapse, "posterior ends module batches *"),
]
"""The first positional arguments in their order, then names of some keyword-only arguments."""

FIELDS = {
    rg.Group: "name size kind placements",
    rg.Placement: "parameter axis",
    rg.Symmetry: "groups",
    rg.Task: "module batches",
    rg.connect.Curve: "barrier auc table",
}
SOURCE = Path(rg.__file__).parent
PRIVATE = {"core", "relaxed", "cli"}
"""Packages whose names are only for the library itself."""
FRONT_DOORS = sorted(path.parent for path in SOURCE.glob("*/__init__.pyi"))
METHODS = (rg.alignment.Method, rg.gauging.GaugeMethod)
"""Kinds of methods, of which the public interface may contain any number."""


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda x: getattr(x, "__qualname__", ""))
def test_networks_come_first_then_data_then_the_symmetry(function: Callable[..., Any], expected: str) -> None:
    parameters = [p for name, p in inspect.signature(function).parameters.items() if name != "self"]
    positional, _, keywords = expected.partition("*")
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names[: len(positional.split())] == positional.split()
    if "*" in expected:
        assert names == positional.split()
        assert set(keywords.split()) <= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(("kind", "expected"), FIELDS.items(), ids=lambda x: getattr(x, "__qualname__", ""))
def test_objects_have_the_documented_attributes(kind: type, expected: str) -> None:
    fields = getattr(kind, "__dataclass_fields__", {})
    assert [name for name in expected.split() if name not in fields and not hasattr(kind, name)] == []


def test_the_front_door_is_small() -> None:
    packages = {name for name in dir(rg) if inspect.ismodule(getattr(rg, name))}
    assert packages <= {path.name for path in Path(rg.__file__).parent.iterdir() if path.is_dir()}
    methods = {
        name for name in dir(rg) if isinstance(getattr(rg, name), type) and issubclass(getattr(rg, name), METHODS)
    }
    assert len(set(dir(rg)) - packages - methods) <= 31
    assert not [name for name in dir(rg) if name.startswith("_")]


def test_wrong_names_get_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="no attribute 'WeightMatch'; did you mean 'WeightMatching'"):
        rg.WeightMatch  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'uci_mlp'; did you mean 'uci_mlps'"):
        rg.zoo.presets.uci_mlp  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'zzzz'; `dir\(regauge.zoo\)` lists its names"):
        rg.zoo.zzzz  # noqa: B018


@pytest.mark.parametrize(
    ("word", "close"),
    [
        ("brest", "breast-cancer"),
        ("breast-cancr", "breast-cancer"),
        ("cancer", "breast-cancer"),
        ("digit", "digits"),
        ("zzzz", None),
        ("", None),
    ],
)
def test_the_nearest_name_may_resemble_in_a_part(word: str, close: str | None) -> None:
    assert nearest(word, ["mnist", "digits", "breast-cancer"]) == close


def test_every_package_has_the_same_kind_of_front_door() -> None:
    """Each package has a stub, which type checkers and Python read: neither of them omits a line."""
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} - PRIVATE == {one.name for one in FRONT_DOORS}
    for folder in (SOURCE, *FRONT_DOORS):
        package = import_module(".".join(folder.relative_to(SOURCE.parent).parts))
        lines = (folder / "__init__.pyi").read_text(encoding="utf-8").splitlines()
        imports = [line.split() for line in lines if line.startswith("from ")]
        assert all(line[-1] == line[-3] and line[-2] == "as" for line in imports)
        assert dir(package) == sorted(package.__all__) == sorted(line[-1] for line in imports)


def test_importing_modules_replaces_no_public_name() -> None:
    """`regauge.connect.line` is the function after any imports, although its file has the same name."""
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        f"packages = ['regauge', *{[f'regauge.{one.name}' for one in FRONT_DOORS]}]\n"
        "doors = [import_module(name) for name in packages]\n"
        "heavy = {'torch', 'numpy', 'scipy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "wanted = [(door, name, getattr(door, name)) for door in doors for name in door.__all__]\n"
        "for door in doors[1:]:\n"
        "    for name in door.__all__:\n"
        "        try:\n            import_module(f'{door.__name__}.{name}')\n"
        "        except ModuleNotFoundError:\n            pass\n"
        "for door, name, found in wanted:\n"
        "    assert getattr(door, name) is found, (door, name)\n"
        # From the beginning, with the files first: none hides its function.
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'regauge']:\n"
        "    del sys.modules[name]\n"
        "import regauge.connect.line, regauge.nets.mlp, regauge.canonical.canonicalize, regauge as rg\n"
        "from regauge.nets import mlp\n"
        "assert all(map(callable, (rg.line, rg.connect.line, mlp, rg.canonical.canonicalize)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_function_checks_its_arguments() -> None:
    """A public function that takes a symmetry, a task or a generator answers typical mistakes in a sentence."""
    unchecked = set()
    for package in [rg, *(getattr(rg, name) for name in dir(rg) if inspect.ismodule(getattr(rg, name)))]:
        for name in getattr(package, "__all__", dir(package)):
            function = getattr(package, name)
            if (
                not inspect.isfunction(function)
                or function.__code__.co_filename == check_arguments.__code__.co_filename
            ):
                continue
            parameters = inspect.signature(function).parameters
            several = [p for p in parameters if "Sequence" in str(parameters[p].annotation)]
            if CHECKS.keys() & parameters.keys() - set(several):
                unchecked.add(f"{package.__name__}.{name}")
    assert unchecked == set()


def test_every_public_function_may_be_called_without_a_generator() -> None:
    """By default, random numbers come from seed 0, so the result is always the same."""
    needy = set()
    for package in [rg, *(getattr(rg, name) for name in dir(rg) if inspect.ismodule(getattr(rg, name)))]:
        for name in getattr(package, "__all__", dir(package)):
            if inspect.isfunction(function := getattr(package, name)):
                chance = inspect.signature(function).parameters.get("generator")
                if chance is not None and chance.default is not None:
                    needy.add(f"{package.__name__}.{name}")
    assert needy == set()
    module = torch.nn.Linear(3, 4)
    drawn = [initialize(module)["weight"] for _ in range(2)]
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], initialize(module, torch.Generator().manual_seed(0))["weight"])


def test_names_of_earlier_versions_lead_where_they_are_now() -> None:
    count = 0
    for file in sorted(SOURCE.rglob("__init__.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "moved":
                package = import_module(".".join(file.parent.relative_to(SOURCE.parent).parts))
                for old in eval(ast.unparse(node.value), dict(vars(package))):
                    count += 1
                    assert old not in dir(package)
                    getattr(package, old)
    assert count > 90
    assert rg.plane is rg.connect.plane  # type: ignore[attr-defined]


def test_names_that_the_changelog_calls_renamed_are_the_same_object() -> None:
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \| (`.*`) \|$", text, re.MULTILINE)
    pairs = [pair for row in rows for pair in zip(*(re.findall(r"`(\w+)\.(\w+)`", side) for side in row), strict=True)]
    assert len(pairs) >= 9
    for (package, earlier), (place, now) in pairs:
        assert getattr(getattr(rg, package), earlier) is getattr(getattr(rg, place), now)
        assert earlier not in dir(getattr(rg, package))
