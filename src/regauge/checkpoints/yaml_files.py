"""A reader of untrusted YAML files, whose size is limited both before and after aliases are replaced."""

from pathlib import Path
from typing import Any

import yaml

from regauge.checkpoints.plain_files import require_plain

LARGEST_FILE = 1 << 20
"""The largest size of a file in bytes."""
MOST_ENTRIES = 20_000
"""The largest number of values in a file. The values of an alias count once for each use of the alias."""
REFUSED = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""Errors that PyYAML raises for nodes that are not plain YAML values."""


def compose_yaml(path: Path) -> yaml.Node | None:
    """Return the root node of a YAML file, before values are constructed; return None for an empty file.

    Raises:
        ValueError: The file is not YAML, is too large, repeats content too often, or contains an unpaired surrogate.
    """
    require_plain(path)
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{str(path)!r} has more than {LARGEST_FILE:,} bytes; shorten it")
    try:
        node: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is no YAML file: {' '.join(str(error).split())}; correct it there") from error
    try:
        if node is not None and _count(node, {}) > MOST_ENTRIES:
            raise ValueError(
                f"{str(path)!r} has more than {MOST_ENTRIES:,} entries, including repeated ones; shorten it"
            )
    except UnicodeEncodeError as error:
        raise ValueError(f"{str(path)!r} contains an incomplete character, {error.object!r}; correct it") from error
    except RecursionError as error:
        raise ValueError(f"{str(path)!r} refers to itself without end; write the values instead") from error
    return node


def read_yaml(path: Path) -> Any:
    """Return the plain values in a YAML file; return None for an empty file.

    Raises:
        ValueError: `compose_yaml` raises an error for the file, or a value cannot be read.
    """
    node = compose_yaml(path)
    try:
        return None if node is None else yaml.constructor.SafeConstructor().construct_document(node)
    except REFUSED as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{str(path)!r} has a value that cannot be read: {reason}") from error


def yaml_text(value: Any) -> str:
    """Return plain values as YAML text. The keys of mappings keep their order."""
    text: str = yaml.safe_dump(value, sort_keys=False)
    return text


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a file. The values of an alias count once for each use of the alias."""
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        inner = [one for pair in pairs for one in pair] if pairs else node.value
        if isinstance(inner, str):
            inner.encode()
        known[id(node)] = 1 + (sum(_count(one, known) for one in inner) if isinstance(inner, list) else 0)
    return known[id(node)]
