"""The source files of the library, their syntax trees, the public names in them, and the pages of the documentation."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import regauge

SOURCE = Path(regauge.__file__).parent
ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
"""The pages of the documentation."""
FILES = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is read on first use, because most workers need only the trees of
    packages.
    """
    return ast.parse(FILES[path])


@cache
def nodes() -> dict[Path, tuple[ast.AST, ...]]:
    """Return all nodes of the syntax trees of all files. Garbage collection is disabled while they are created."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return {path: (*ast.walk(tree_of(path)),) for path in FILES}
    finally:
        if collects:
            gc.enable()


def module_of(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = ("regauge", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def public_names() -> Iterator[str]:
    """Yield the names that packages list in a stub or `__all__`. A name in a package and in a subpackage counts
    once.
    """
    listed: dict[str, set[str]] = {}
    for path in sorted((path for path in FILES if path.name == "__init__.py"), key=lambda path: len(path.parts)):
        package = module_of(path)
        stub = SOURCE / path.with_suffix(".pyi")
        names: set[str] = set()
        if stub.exists():
            for node in ast.parse(stub.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ImportFrom):
                    names |= {one.asname or one.name for one in node.names}
        else:
            for node in tree_of(path).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    names |= set(ast.literal_eval(node.value))
        listed[package] = names
        above = listed.get(".".join(package.split(".")[:2]), set()) if package.count(".") > 1 else set()
        yield from sorted(f"{package}.{name}" for name in names - above)


PUBLIC = set(public_names())
"""All public names, including functions that have the names of their files, such as `regauge.discovery.discover`."""
