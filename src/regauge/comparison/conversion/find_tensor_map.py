"""The search for the tensors of which another implementation of a model made its own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.output import Output
from regauge.comparison.comparison_report import require_page
from regauge.comparison.conversion.given_tensors import GivenTensors, is_constant, is_measured, squeeze
from regauge.comparison.conversion.match_fibers import match_matrix
from regauge.comparison.conversion.match_values import match_values
from regauge.comparison.conversion.tensor_map import MadeTensor, TensorMap
from regauge.core.arguments import check_arguments
from regauge.core.counted import count
from regauge.core.progress import Progress, no_progress

FEW = 4
"""Tensors that are searched first; only if all of them are found are the others."""


@check_arguments
def find_tensor_map(
    a: Mapping[str, Tensor] | nn.Module | str | Path,
    b: Mapping[str, Tensor] | nn.Module | str | Path,
    *,
    out: Output | str | Path | None = None,
    progress: Progress = no_progress,
) -> TensorMap:
    """Find how the tensors of one implementation of a model are made of those of another one, by their values.

    Tensors may be renamed, transposed, reshaped, packed and split (queries, keys and values; gates and ups; experts),
    interleaved by head, reordered (the halves of rotary pairs; permuted units), multiplied by a number, and one plus
    the other. The result has a formula of torch for each tensor, says what prevents one, and converts other
    networks of A's implementation.

    Vectors along one axis are found again by random projections in trees of nearest neighbors. Then all values are
    compared: nothing is reported as made of A that differs by more than the rounding of the coarser format.

    Args:
        a: The network that is given: tensors by name, a module, or the path of a checkpoint.
        b: The network whose tensors are explained.
        out: The page of the conversion, a self-contained `.html` file: a path, or an `Output`.
        progress: Counts tensors.

    Raises:
        FileExistsError: The page exists and may not be replaced.
        FileNotFoundError: A checkpoint does not exist.
        ValueError: A network holds NaN, or no tensors with values.
    """
    require_page(out)
    one, two = _opened(a), _opened(b)
    advance = progress("tensors", len(one) + len(two))
    labels = getattr(one, "label", "A"), getattr(two, "label", "B")
    found = replace(_explain(GivenTensors(one, "A", advance), two, advance), labels=labels)
    found.write_page(out)
    return found


def find_layout(a: str | Path, b: str | Path, *, progress: Progress = no_progress) -> TensorMap | None:
    """Find a conversion of two checkpoints whose tensors differ in names, but for prefixes, or in shapes; else None."""
    with Checkpoint.open(a) as one, Checkpoint.open(b) as two:
        shapes = [{name: place.shape for name, place in network.stored.items()} for network in (one, two)]
    is_other = any(not _is_among(*pair, other) for own, other in (shapes, shapes[::-1]) for pair in own.items())
    return find_tensor_map(a, b, progress=progress) if is_other else None


def _is_among(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a name stands among others with its shape, without or with a prefix."""
    shorter = (name[at:] for at in (0, *(at + 1 for at, letter in enumerate(name) if letter == ".")))
    if any(shapes.get(one) == shape for one in shorter):
        return True
    return any(there == shape and other.endswith(f".{name}") for other, there in shapes.items())


def find_reordered(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    """Return a sentence on tensors of B that hold the values of A's in another order; empty if there are none."""
    names = [
        name
        for name in a
        if name in b
        and a[name].ndim > 1
        and a[name].shape == b[name].shape
        and all(one[name].is_floating_point() and bool(one[name].isfinite().all()) for one in (a, b))
        and not torch.equal(a[name], b[name])
    ]
    if not names:
        return ""
    few = sorted(names, key=lambda name: a[name].numel())[:FEW]
    for some in (few, names):
        found = find_tensor_map({name: a[name] for name in some}, {name: b[name] for name in some})
        if found.missing:
            return ""
    name, one = next(iter(found.origins.items()))
    return (
        f"B holds A's values of {count(names, 'tensor')} in another order, for example {name!r} as {one.formula}: "
        "a conversion of one of them went wrong, or the code that reads them differs"
    )


def _opened(network: Mapping[str, Tensor] | nn.Module | str | Path) -> Mapping[str, Tensor]:
    if isinstance(network, nn.Module):
        network = network.state_dict()
    opened = Checkpoint.open(network) if isinstance(network, str | Path) else network
    if not isinstance(opened, Mapping) or not opened:
        raise ValueError("a network without tensors cannot be compared; give a state dict, a module or a checkpoint")
    wrong = next((name for name, one in opened.items() if not isinstance(one, Tensor) or one.is_meta), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is no tensor with values; give a state dict of tensors that are loaded")
    return opened


def _explain(given: GivenTensors, params: Mapping[str, Tensor], advance: Callable[[], object]) -> TensorMap:
    """Return the origins of all tensors of B: of matrices first, which vectors then follow, and constants last."""
    origins: dict[str, MadeTensor] = {}
    flat, constant = [], []
    for name in params:
        tensor = params[name]
        if tensor.numel():
            if is_constant(tensor):
                constant.append(name)
            elif is_measured(name, tensor, "B") and squeeze(tensor).ndim > 1:
                origins[name] = given.use(match_matrix(given, name, tensor))
            else:
                flat.append(name)
        advance()
    for name in (*flat, *constant):
        origins[name] = given.use(match_values(given, name, params[name], origins))
    ordered = {name: origins[name] for name in params if name in origins}
    floats = [name for name in given.params if name not in given.integers and given.params[name].numel()]
    used = [name for name in floats if name in given.used]
    unused = (name for name in floats if name not in given.used and not any(given.is_equal(name, one) for one in used))
    return TensorMap(ordered, tuple(unused), tuple(_parted(given, ordered)))


def _parted(given: GivenTensors, origins: Mapping[str, MadeTensor]) -> Iterator[str]:
    """Yield tensors of A of which some fibers are used, but not all."""
    taken: dict[str, set[int]] = {}
    for origin in origins.values():
        for place, source in enumerate(origin.sources):
            if source.name is not None:
                own = taken.setdefault(source.name, set())
                own.update(origin.index[origin.owner == place].tolist())
    for name, own in taken.items():
        lengths = [1, *(one for one in given.shapes[name] if one > 1)]
        if not any(len(own) == prod(given.shapes[name]) // length for length in lengths):
            yield name
