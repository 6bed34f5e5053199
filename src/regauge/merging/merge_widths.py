"""Networks of different widths merged into one, in the widths of the first."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.alignment import Method, correspond
from regauge.core.arguments import check_arguments
from regauge.core.balance import balance, has_balance
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.merging.merge_networks import merge
from regauge.merging.merge_record import MergeResult
from regauge.merging.rule import Rule
from regauge.merging.settings import Number


@check_arguments
def merge_widths(
    params: Sequence[Mapping[str, Tensor]],
    symmetries: Sequence[Symmetry],
    *,
    regularization: float = 0.0,
    method: Method | None = None,
    weights: Sequence[Number] | None = None,
    rule: Rule | None = None,
    task: Task | None = None,
    test: Task | None = None,
    generator: torch.Generator | None = None,
    labels: Sequence[str] | None = None,
) -> MergeResult:
    """Bring networks of one architecture into the widths of the first, then merge them as `merge` does.

    Each network is mapped by a soft correspondence of its units to those of the first (`correspond`): units that
    belong to one unit of the first are averaged, and their outgoing weights summed; units that belong to several are
    split. Scales and matrices are balanced for that, since transport compares units as they are. A network that has
    every unit of the first several times, with the outgoing weights divided among the copies, is mapped to the first
    exactly.

    Args:
        params: The networks; the first has the widths of the result. Those of the same widths are not mapped.
        symmetries: One for each network, with the same groups on the same parameters.
        regularization: The softness of the correspondences; see `correspond`.
        method: The method that aligns the mapped networks afterwards, as in `merge`.
        weights: One for each network.
        rule: The rule for the aligned networks, a mean: `Average()` by default.
        task: A task of the first network's architecture, as in `merge`.
        test: The task that judges for the record, as in `merge`.
        generator: The source of chance, for methods that use it.
        labels: Names of the networks in the record.

    Returns:
        The merged parameters, and the record; its distances and metrics before are those of the mapped networks.

    Raises:
        ValueError: There is no network, there are not as many symmetries, the networks differ in more than widths, or
            they cannot be merged.

    References:
        Singh and Jaggi (2020), Model fusion via optimal transport, section 4.
    """
    if not params:
        raise ValueError("there is no network to merge; give at least one")
    if len(symmetries) != len(params):
        raise ValueError(f"there are {len(symmetries)} symmetries for {len(params)} networks; give one for each")
    first = symmetries[0].bind(params[0])
    anchor = _balance(params[0], first)
    mapped: list[Params] = []
    for network, symmetry in zip(params, symmetries, strict=True):
        if all(tensor.shape == params[0][name].shape for name, tensor in network.items() if name in params[0]):
            mapped.append(dict(network))
            continue
        bound = symmetry.bind(network)
        even = _balance(network, bound)
        mapped.append(correspond(anchor, even, first, bound, regularization=regularization).apply(even))
    return merge(
        mapped,
        first,
        method=method,
        weights=weights,
        rule=rule,
        task=task,
        test=test,
        generator=generator,
        labels=labels,
    )


def _balance(params: Mapping[str, Tensor], symmetry: Symmetry) -> Params:
    if not has_balance(symmetry):
        return dict(params)
    return symmetry.act(balance(params, symmetry, buffers="keep"), params)
