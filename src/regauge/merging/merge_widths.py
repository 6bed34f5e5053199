"""Merging of networks of different widths into a network with the widths of the first."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.alignment import Method, correspond
from regauge.core.arguments import check_arguments
from regauge.core.balance import balance
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
    """Map networks to the widths of the first network, and merge the mapped networks with `merge`.

    All networks have one architecture. Each network is mapped by a soft correspondence between its units and the units
    of the first network (`correspond`). If several units correspond to one unit of the first network, they are
    averaged, and their outgoing weights are summed. A unit that corresponds to several units of the first network is
    split. Optimal transport compares units only in their given scales, so scales and invertible matrices are balanced
    first. A network may hold several copies of every unit of the first network, with outgoing weights divided among the
    copies. A network of copied units is mapped exactly to the first network.

    Args:
        params: The networks. The first network has the widths of the result. Networks with the same widths are not
            mapped.
        symmetries: One symmetry for each network, with the same groups on the same parameters.
        regularization: The softness of the correspondences; see `correspond`.
        method: The method that aligns the mapped networks, as in `merge`.
        weights: One weight for each network.
        rule: The rule for the aligned networks, which must be a mean; `Average()` by default.
        task: A task for the first network's architecture, as in `merge`.
        test: The task that evaluates networks for the record, as in `merge`.
        generator: The source of randomness, for random methods.
        labels: Names of the networks for the record.

    Returns:
        The merged parameters and the record. The record's distances and metrics before alignment are measured on the
        mapped networks.

    Raises:
        ValueError: There is no network, or the numbers of symmetries and networks differ. The networks differ in more
            than widths, or cannot be merged.

    References:
        Singh and Jaggi (2020), Model fusion via optimal transport, section 4.
    """
    if not params:
        raise ValueError("there is no network to merge; give at least one")
    if len(symmetries) != len(params):
        raise ValueError(f"there are {len(symmetries)} symmetries for {len(params)} networks; give one for each")
    first = symmetries[0].bind(params[0])
    anchor = first.act(balance(params[0], first, buffers="keep"), params[0])
    mapped: list[Params] = []
    for network, symmetry in zip(params, symmetries, strict=True):
        if all(tensor.shape == params[0][name].shape for name, tensor in network.items() if name in params[0]):
            mapped.append(dict(network))
            continue
        bound = symmetry.bind(network)
        even = bound.act(balance(network, bound, buffers="keep"), network)
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
