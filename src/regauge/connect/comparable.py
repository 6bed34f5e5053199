"""The check that networks can be interpolated, and how far a loss exceeds the interpolated loss of the endpoints."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from regauge.core.params import equal_names, require_alike
from regauge.core.task import Task, arguments
from regauge.discovery.structure_buffers import find_structure


def require_comparable(networks: Sequence[Mapping[str, Tensor]], judge: object) -> None:
    """Raise an error unless networks are finite and have the same architecture and (if a task defines it) structure.

    Tensors that are equal in all networks, such as masks, may contain Inf.

    Raises:
        ValueError: The networks are not comparable. The message of the error names a tensor.
    """
    first, equal = networks[0], equal_names(networks)
    if isinstance(judge, Task):
        shared = [n for n in first if all(n in one and one[n].shape == first[n].shape for one in networks)]
        different = [n for n, _ in judge.module.named_buffers() if n in shared and n not in equal]
        batch = next(iter(judge.batches), None) if different else None
        structure = () if batch is None else find_structure(judge.module, *arguments(batch[0]), different)
        if structure:
            raise ValueError(
                f"the networks differ in {structure[0]!r}, a structure tensor that training does not change. A network "
                "between them would have neither value; align them first, give networks with equal structure, or use a "
                "function as the judge"
            )
    require_alike(*networks, structure=equal)


def excess_of(rows: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Return `loss(t) - ((1 - t) loss(0) + t loss(1))` for rows with "t" and "loss".

    The excess is zero at both endpoints.
    """
    first, last = rows[0]["loss"], rows[-1]["loss"]
    inner = [row["loss"] - ((1 - row["t"]) * first + row["t"] * last) for row in rows[1:-1]]
    return (0.0, *inner, 0.0)
