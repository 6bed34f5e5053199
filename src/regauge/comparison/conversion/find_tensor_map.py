"""The search for formulas that compute the tensors of one implementation of a model from those of another."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.output import Output
from regauge.comparison.comparison_report import require_page
from regauge.comparison.conversion.match_fibers import GivenTensors, is_constant, is_measured, match_matrix, squeeze
from regauge.comparison.conversion.match_values import match_values
from regauge.comparison.conversion.tensor_map import MadeTensor, TensorMap
from regauge.core.arguments import check_arguments
from regauge.core.counted import count
from regauge.core.progress import Progress, no_progress

FEW = 4
"""The number of tensors that are searched first. The remaining tensors are searched only if all of the first tensors
are found.
"""


@check_arguments
def find_tensor_map(
    a: Mapping[str, Tensor] | nn.Module | str | Path,
    b: Mapping[str, Tensor] | nn.Module | str | Path,
    *,
    out: Output | str | Path | None = None,
    progress: Progress = no_progress,
) -> TensorMap:
    """Find formulas that compute the tensors of implementation B of a model from those of implementation A.

    The search uses only the entries of the tensors, not their names. Tensors of B may be renamed, transposed, reshaped,
    interleaved by head, or multiplied by a number. For vectors, the formula may also add a number. Tensors may be
    concatenated and split (queries, keys and values; gates and ups; experts) or permuted (the halves of rotary pairs;
    units). The result contains a torch formula for each tensor, or the reason why there is no formula. The same
    formulas convert other networks of implementation A.

    The vectors along one axis of the tensors are matched by nearest-neighbor search on random projections. Afterwards,
    all entries are compared. A formula is reported only if all entries agree up to the rounding of the coarser format.

    Args:
        a: The source network: tensors by name, a module, or the path of a checkpoint.
        b: The target network, for whose tensors formulas are found.
        out: The path or `Output` of a self-contained `.html` page of the conversion.
        progress: A function that shows how many tensors are done.

    Raises:
        FileExistsError: The page exists and may not be replaced.
        FileNotFoundError: A checkpoint does not exist.
        ValueError: A network contains NaN, or contains no tensors with entries.
    """
    require_page(out)
    one, two = _opened(a), _opened(b)
    advance = progress("tensors", len(one) + len(two))
    labels = getattr(one, "label", "A"), getattr(two, "label", "B")
    found = replace(_explain(GivenTensors(one, "A", advance), two, advance), labels=labels)
    found.write_page(out)
    return found


def find_layout(a: str | Path, b: str | Path, *, progress: Progress = no_progress) -> TensorMap | None:
    """Find a conversion if the names (apart from prefixes) or shapes of two checkpoints differ, else return None."""
    with Checkpoint.open(a) as one, Checkpoint.open(b) as two:
        shapes = [{name: place.shape for name, place in network.stored.items()} for network in (one, two)]
    is_other = any(not _is_among(*pair, other) for own, other in (shapes, shapes[::-1]) for pair in own.items())
    return find_tensor_map(a, b, progress=progress) if is_other else None


def _is_among(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether `shapes` contains a name, with or without a prefix, that has this shape."""
    shorter = (name[at:] for at in (0, *(at + 1 for at, letter in enumerate(name) if letter == ".")))
    if any(shapes.get(one) == shape for one in shorter):
        return True
    return any(there == shape and other.endswith(f".{name}") for other, there in shapes.items())


def find_reordered(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    """Return a message about tensors of B that contain the entries of a tensor of A in another order. If no tensor is
    reordered, the message is empty.
    """
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
        raise ValueError(f"{wrong!r} is not a tensor with values; give a state dict of loaded tensors")
    return opened


def _explain(given: GivenTensors, params: Mapping[str, Tensor], advance: Callable[[], object]) -> TensorMap:
    """Return the origin of each tensor of B, which is its formula or the reason why there is none.

    Matrices are searched first, then vectors, and constants last.
    """
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
    """Yield the tensors of A from which the formulas use some fibers (vectors along an axis), but not all."""
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
