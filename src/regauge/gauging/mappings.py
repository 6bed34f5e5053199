"""Tables of scale pairs for llm-compressor and AutoAWQ: each row names a layer to divide, and layers to multiply."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shorten
from typing import Any, Literal

from regauge.checkpoints.plain_files import require_plain
from regauge.checkpoints.writing import require_writable, save_text
from regauge.checkpoints.yaml_files import read_yaml, yaml_text
from regauge.core.arguments import check_arguments
from regauge.core.expressions import Expression
from regauge.core.scales import Direction, ScaleSite, directions
from regauge.core.symmetry import Symmetry
from regauge.gauging.methods.equalize import diagonal

Tool = Literal["llm-compressor", "autoawq"]
SUFFIXES = (".json", ".yaml", ".yml")
"""Suffixes of files that contain a table."""
EXPRESSION = "re:"
"""The prefix of patterns that are regular expressions."""


@dataclass(frozen=True)
class ScalePair:
    """A layer whose outputs are divided by scales, and the layers that read it, whose input weights are multiplied.

    If the layers that read the first layer use only a part of its output channels, tools divide the last channels. For
    example, an output projection reads only the values of a fused layer of queries, keys and values.

    The fields hold module names. In a table of mappings, the fields may hold patterns instead of names. A pattern is
    either the end of a name, or `re:` plus a regular expression that matches the beginning of a name.
    """

    smooth: str
    balance: tuple[str, ...]


@check_arguments
def scale_pairs(symmetry: Symmetry) -> tuple[list[ScalePair], list[tuple[str, str]]]:
    """Return the scale pairs that hold for a model according to its symmetry, and the families of scales that are not
    pairs.

    A family of scales is a pair if it divides one module, multiplies the inputs of other modules, and changes nothing
    else. Families of scales that are not pairs are listed by the names of their groups, with the reason for each.
    """
    pairs: dict[ScalePair, None] = {}
    others: list[tuple[str, str]] = []
    for direction in directions(diagonal(symmetry), "move"):
        found = _pair_of(direction, symmetry)
        if isinstance(found, str):
            others.append((direction.group, found))
        else:
            pairs[found] = None
    return list(pairs), list(dict.fromkeys(others))


def _pair_of(direction: Direction, symmetry: Symmetry) -> ScalePair | str:
    names = [{place.name for place in direction.places if (place.exponent > 0) == is_up} for is_up in (True, False)]
    reading = {place.name for place in direction.places if (place.name, place.axes[-1]) in symmetry.readers}
    sides = [side for side in names if side and side <= reading and all(len(symmetry.shapes[n]) == 2 for n in side)]
    if len(sides) != 1:
        return "some values that it multiplies are not inputs of layers with one weight"
    (readers,) = sides
    writers = names[0] if readers is names[1] else names[1]
    modules = {name.rpartition(".")[0] for name in writers}
    if len(modules) != 1 or not all(name.rpartition(".")[2] in ("weight", "bias") for name in writers | readers):
        return "the values that it divides are not the weight and bias of one module"
    if {abs(place.exponent) for place in direction.places} != {2.0}:
        return "its exponents are not all one"
    if any(place.axes != ((1,) if place.name in readers else (0,)) for place in direction.places):
        return "its layers do not have their inputs along the second axis of the weights, which tools scale"
    orders = {_last_units(place, symmetry.shapes[place.name][place.axes[-1]]) for place in direction.places}
    lengths = {symmetry.shapes[name][1] for name in readers}
    if len(orders) > 1 or lengths != {len(next(iter(orders)))}:
        return "the following layers have other numbers of channels, as with grouped queries"
    if writers & symmetry.added.keys():
        return "the model adds a number to its gain, which tools do not support"
    order = [name for name in symmetry.shapes if name in readers]
    return ScalePair(modules.pop(), tuple(name.rpartition(".")[0] for name in order))


def _last_units(place: ScaleSite, length: int) -> tuple[int, ...]:
    """Return the units at the end of an axis, in order; empty if the units have gaps or do not reach the end."""
    order = place.positions.argsort()
    is_last = place.positions[order].tolist() == [*range(length - len(order), length)]
    return tuple(place.index.flatten()[order].tolist()) if is_last else ()


def write_table(pairs: Sequence[ScalePair], tool: Tool) -> list[dict[str, Any]]:
    """Return the pairs as a table for AWQ in llm-compressor (exact names are written as `re:^name$`) or for AutoAWQ."""
    if tool == "autoawq":
        return [{"smooth_layer": one.smooth, "balance_layers": list(one.balance)} for one in pairs]
    return [
        {"smooth_layer": _exactly(one.smooth), "balance_layers": [_exactly(name) for name in one.balance]}
        for one in pairs
    ]


@check_arguments
def save_mappings(
    symmetry: Symmetry, path: str | Path, tool: Tool, *, overwrite: bool = False
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Write the scale pairs that hold for a model to a JSON or YAML file, as a table for llm-compressor or AutoAWQ.

    Returns:
        The rows of the table. The result also contains the group and the reason for each family of scales that is not a
        pair.

    Raises:
        FileExistsError: The file exists and `overwrite` is false.
        ValueError: No family is a pair, or the file name does not end in `.json`, `.yaml` or `.yml`.
    """
    path = Path(path)
    require_writable(path, overwrite=overwrite, suffixes=SUFFIXES)
    pairs, others = scale_pairs(symmetry)
    if not pairs:
        raise ValueError(
            "no scale pair of the model can be written as modules with one weight; transform the network with "
            "`rg.gauge` instead"
        )
    rows = write_table(pairs, tool)
    save_text(json.dumps(rows, indent=1) + "\n" if path.suffix == ".json" else yaml_text(rows), path)
    return rows, others


def read_table(table: Any) -> list[ScalePair]:
    """Return the pairs of a table. Each row is a dictionary with `smooth_layer` and `balance_layers`, or a pair.

    A pair contains the balance layers, followed by the smooth layer, as in llm-compressor's SmoothQuant. A recipe that
    contains `mappings` is also a table.

    Raises:
        ValueError: The object is not a table of mappings, or has no rows.
    """
    rows = _find_rows(table)
    if not rows:
        raise ValueError(
            "there are no mappings: give a list of {smooth_layer, balance_layers}, or of [balance layers, smooth "
            "layer], or a recipe with such a list under 'mappings'"
        )
    return [_read_row(row) for row in rows]


@check_arguments
def read_mappings(path: str | Path) -> list[ScalePair]:
    """Return the pairs of a table in a JSON or YAML file; see `read_table`.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file does not contain a table of mappings.
    """
    path = Path(path)
    if not path.is_file():
        require_plain(path)
        raise FileNotFoundError(
            f"there is no table {str(path)!r}; `regauge gauge MODEL --mappings autoawq -o FILE` writes one"
        )
    found = read_yaml(path)
    try:
        return read_table(found)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


def _find_rows(table: Any) -> list[Any]:
    if isinstance(table, list):
        return table
    if isinstance(table, Mapping):
        if "mappings" in table:
            return _find_rows(table["mappings"])
        for value in table.values():
            found = _find_rows(value) if isinstance(value, Mapping) else []
            if found:
                return found
    return []


def _read_row(row: Any) -> ScalePair:
    if isinstance(row, Mapping) and {"smooth_layer", "balance_layers"} <= row.keys():
        smooth, balance = row["smooth_layer"], row["balance_layers"]
    elif isinstance(row, list | tuple) and len(row) == 2:
        balance, smooth = row
    else:
        raise ValueError(
            f"the row {shorten(row)} is not a mapping; write {{smooth_layer, balance_layers}} or [balance layers, "
            "smooth layer]"
        )
    smooth = smooth[0] if isinstance(smooth, list) and len(smooth) == 1 else smooth
    balance = [balance] if isinstance(balance, str) else balance
    if not isinstance(smooth, str) or not isinstance(balance, list) or not all(isinstance(one, str) for one in balance):
        raise ValueError(f"the row {shorten(row)} does not name one smooth layer and some balance layers; write both")
    for pattern in (one for one in (smooth, *balance) if one.startswith(EXPRESSION)):
        try:
            _expression(pattern.removeprefix(EXPRESSION))
        except ValueError as error:
            raise ValueError(f"{shorten(pattern)} in the row {shorten(row)} cannot be read: {error}") from error
    return ScalePair(smooth, tuple(balance))


def resolve_pair(pair: ScalePair, modules: Iterable[str]) -> list[ScalePair]:
    """Return the modules that match a row: each smooth layer with the balance layers in the same block.

    The smooth layer is the layer that is divided, and the balance layers are multiplied. The blocks of a smooth layer
    are the modules that contain it, and the smallest block with balance layers is used. The largest possible block is
    the module whose name ends with the last number in the layer's name, such as `layers.7`.
    """
    names = list(modules)
    result = []
    for smooth in (name for name in names if _matches(pair.smooth, name)):
        block = re.match(r"(.*\.\d+\.|\d+\.)?", smooth)
        outermost = (block[1] if block else None) or ""
        behind = [n for n in names if n != smooth and any(_matches(one, n) for one in pair.balance)]
        prefix, balance = smooth, list[str]()
        while not balance and len(prefix) > len(outermost):
            prefix = prefix.rstrip(".").rpartition(".")[0]
            prefix = f"{prefix}." if prefix else ""
            balance = [name for name in behind if name.startswith(prefix)]
        result.append(ScalePair(smooth, tuple(balance)))
    return result


@lru_cache(maxsize=2048)
def _expression(pattern: str) -> Expression:
    return Expression(pattern)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(EXPRESSION):
        return _expression(pattern.removeprefix(EXPRESSION)).match(name)
    return name == pattern or name.endswith(f".{pattern}")


def _exactly(name: str) -> str:
    return f"re:^{re.escape(name)}$"
