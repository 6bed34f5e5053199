"""Public names of regauge, each with the object behind it and the one page that shows it."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import regauge

SOURCE = Path(regauge.__file__).parent


@dataclass(frozen=True)
class Public:
    """A public name: what it is, where it is written, and other public names of one object.

    Attributes:
        name: The whole name, such as `regauge.align`.
        others: Further whole names of the same object.
        origin: The module that a package takes it from.
        value: The object.
    """

    name: str
    others: tuple[str, ...]
    origin: str
    value: Any

    @property
    def package(self) -> str:
        """The package that lists it."""
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        """The name within its package."""
        return self.name.rpartition(".")[2]

    @cached_property
    def kind(self) -> str:
        """Whether it is a package, a function, a class or data."""
        if inspect.ismodule(self.value):
            return "package"
        if isinstance(self.value, type):
            return "class"
        return "function" if inspect.isroutine(self.value) else "data"

    @cached_property
    def text(self) -> str:
        """Its docstring; data have theirs behind them in the source."""
        if self.kind != "data":
            return inspect.getdoc(self.value) or ""
        spec = find_spec(self.origin)
        assert spec is not None
        body = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")).body
        for node, behind in pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            is_text = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            if is_text and any(isinstance(one, ast.Name) and one.id == self.short for one in targets):
                return inspect.cleandoc(ast.literal_eval(behind.value))  # type: ignore[attr-defined]
        return ""

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring, on one line."""
        return " ".join(self.text.partition("\n\n")[0].split())


def packages() -> list[str]:
    """The packages that list public names, `regauge` first."""
    return ["regauge", *sorted(f"regauge.{stub.parent.name}" for stub in SOURCE.glob("*/__init__.pyi"))]


def origins(package: str) -> Iterator[tuple[str, str]]:
    """The names that the stub of a package lists, and the modules that they are from."""
    stub = SOURCE.joinpath(*package.split(".")[1:], "__init__.pyi")
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                yield one.asname or one.name, ".".join(filter(None, (package, node.module)))


def public() -> list[Public]:
    """All public objects, each once: under its shortest name, in the order of packages."""
    found: dict[Any, Public] = {}
    for package in packages():
        module = import_module(package)
        for short, origin in sorted(origins(package), key=lambda one: one[0].lower()):
            name = f"{package}.{short}"
            one = Public(name, (), origin, getattr(module, short))
            key = name if one.kind == "data" else id(one.value)
            if key in found:
                first = found[key]
                found[key] = Public(first.name, (*first.others, name), first.origin, first.value)
            else:
                found[key] = one
    return list(found.values())


def class_names() -> dict[str, str]:
    """The public name of a class by the module and name under which it is written, and by its public name."""
    classes = [one for one in public() if one.kind == "class"]
    written = {f"{one.value.__module__}.{one.value.__qualname__}": one.name for one in classes}
    return written | {one.name: one.name for one in classes}
