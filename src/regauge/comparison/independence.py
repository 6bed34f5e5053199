"""An exact test of independence, which compares two networks with randomly permuted copies of one of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.core.act import Site
from regauge.core.families import dot, unit_values
from regauge.core.groups import Group, class_labels, within_classes
from regauge.core.symmetry import Symmetry

DRAWS = 999
"""The number of random elements with which the order of the units is compared."""
SKETCH = 128
"""The number of entries that represent a unit in one tensor.

If a unit has more entries, they are summed with fixed random signs."""

Load = Callable[[str], tuple[Tensor, Tensor]]
"""A function that returns a tensor of both networks, given its name."""


@dataclass(frozen=True)
class Independence:
    """The result of the independence test.

    Attributes:
        p_value: The fraction of random permutations under which the networks are at least as similar: (1 + similar
            samples) / (1 + samples).
        z_score: The deviation of the statistic from its exact mean under the null hypothesis, in exact standard
            deviations.
        draws: The number of random elements sampled.
        groups: The groups whose order was tested.
    """

    p_value: float
    z_score: float
    draws: int
    groups: tuple[str, ...]


def measure_independence(
    load: Load,
    symmetry: Symmetry,
    names: Sequence[str],
    *,
    generator: torch.Generator,
    draws: int = DRAWS,
) -> Independence | None:
    """Test whether two networks are independent, by comparing their order of units with random permutations.

    If the networks have no group that can be tested, the result is None.

    The null hypothesis is that the networks are independent, and that all permutations of one network's units are
    equally likely. Permutations are equally likely if the initial weights of all units in a group have the same
    distribution, and if training does not depend on unit indices. Training by SGD or Adam does not depend on unit
    indices. Consider the rank of the statistic T(a, b) among the values T(a, g b) for uniformly random permutations g.
    Under the null hypothesis, all ranks are equally likely. The p-value is therefore exactly uniform for all networks,
    sizes, data and training methods. No distribution is assumed.

    T is a sum of cosines over units and tensors, between the weights of unit i in the first and in the second network.
    Only groups without common tensors are permuted, such as every second layer of a chain. If no two permuted groups
    share a tensor, T is a sum of one entry from each row of a matrix, which is cheap to compute. The mean and the
    variance of T over all permutations have formulas. The test is also exact if, as here, random elements are sampled
    from a subgroup instead of the whole group.

    The test is not valid if one network was aligned to the other, because the alignment chose the order of the units.
    The chosen order makes the p-value small.

    The test cannot recognize a copy to which a random element was applied. The order of units in a randomly transformed
    copy contains no information. A copy to which a random element was applied can only be recognized because it lies on
    the same orbit. But independent networks may also lie on one orbit, for example if training always finds the same
    solution; see `Comparison.reference_p_value`.

    Args:
        load: A function that returns a tensor of both networks, given its name.
        symmetry: The symmetry. All sizes of its groups must be known.
        names: The names of the compared tensors.
        generator: The random generator that samples the elements.
        draws: The number of random elements. The smallest possible p-value is 1 / (1 + draws).

    References:
        Zhu et al. (2025), Independence tests for language models, section 3, for tests by exchangeable units of MLPs;
        Hoeffding (1951), A combinatorial central limit theorem, for mean and variance.
    """
    chosen = choose_groups(symmetry, names)
    statistic, variance = 0.0, 0.0  # Relative to the mean over all orders, which keeps ranks.
    null = torch.zeros(draws, dtype=torch.float64)
    for group, places in chosen:
        first, second = ([], [])  # type: tuple[list[Tensor], list[Tensor]]
        for name, site in places:
            for tensor, into in zip(load(name), (first, second), strict=True):
                into.append(_describe(unit_values(symmetry, name, site, tensor)))
        cosines = (torch.cat(first, -1) @ torch.cat(second, -1).mT).reshape(-1, group.size, group.size)
        labels = class_labels(group)
        for copy in cosines:
            for label in range(len(group.class_sizes)):
                members = torch.nonzero(labels == label).flatten()
                is_all = len(members) == group.size
                block = copy if is_all else copy[members][:, members]
                own, spread = _center(block)
                if not is_all:  # Only units of one class are exchanged.
                    copy[members.unsqueeze(1), members] = block
                statistic, variance = statistic + own, variance + spread
            orders = torch.rand(draws, group.size, generator=generator, device=generator.device).argsort(1).cpu()
            orders = within_classes(group, orders)
            null += copy.gather(1, orders.T).sum(0, dtype=torch.float64)
    units = sum(group.size * symmetry.count_copies(group.name) for group, _ in chosen)
    # Orders whose statistic differs only by rounding count as equally similar.
    close = 1e-6 * math.sqrt(units)
    if not chosen or math.sqrt(variance) <= close:
        return None
    p_value = (1 + int((null >= statistic - close).sum())) / (1 + draws)
    names_of = tuple(group.name for group, _ in chosen)
    return Independence(p_value, statistic / math.sqrt(variance), draws, names_of)


def choose_groups(symmetry: Symmetry, names: Sequence[str]) -> list[tuple[Group, list[tuple[str, Site]]]]:
    """Return permutation groups that have no tensor in common, with the axes on which each group acts.

    Groups with the most permutations come first.

    Tensors in which a group acts on several axes are excluded.
    """
    places: dict[str, dict[str, list[Site]]] = {}
    for name in names:
        for site in symmetry.sites.get(name, ()):
            places.setdefault(site.group.name, {}).setdefault(name, []).append(site)
    found: list[tuple[float, Group, dict[str, list[Site]]]] = []
    for group in symmetry.groups:
        linear = {
            name: sites
            for name, sites in places.get(group.name, {}).items()
            if len({site.placement.axis for site in sites}) == 1
        }
        can_reorder = group.has_order or (group.matrix != "none" and not group.is_proper)
        if can_reorder and group.size > 1 and linear:
            found.append((symmetry.count_copies(group.name) * math.lgamma(group.size + 1), group, linear))
    chosen, used = [], set[str]()
    for _, group, linear in sorted(found, key=lambda one: -one[0]):
        if not used & linear.keys():
            used |= linear.keys()
            chosen.append((group, [(name, site) for name, sites in linear.items() for site in sites]))
    return chosen


def _describe(values: Float[Tensor, "*copies units values"]) -> Float[Tensor, "*copies units numbers"]:
    """Return a few numbers for each unit: a random projection of its normalized entries."""
    length = values.shape[-1]
    if length > SKETCH:
        # A count sketch (Charikar et al. 2002): with random signs, the same in both networks, the inner products of
        # sketches are those of the values in expectation.
        source = torch.Generator().manual_seed(length)
        signs = 1 - 2 * torch.randint(2, (length,), generator=source).to(values)
        signed = values * signs
        if length % SKETCH:
            signed = torch.nn.functional.pad(signed, (0, -length % SKETCH))
        values = signed.reshape(*signed.shape[:-1], -1, SKETCH).sum(-2)
    return torch.nn.functional.normalize(values, dim=-1)


def _center(matrix: Float[Tensor, "n n"]) -> tuple[float, float]:
    """Subtract the means of rows and columns from a matrix in place.

    Return the sum of the diagonal, and the variance of this sum over random permutations of the columns.
    """
    n, double = len(matrix), torch.float64
    matrix -= matrix.mean()
    rows, columns = (matrix.sum(axis).to(double) / n for axis in range(2))
    # Hoeffding (1951): the variance over orders is the sum of the squares, centered by rows and columns, over n - 1.
    left = dot(matrix, matrix) - n * float(rows.square().sum() + columns.square().sum())
    return float(matrix.trace()), max(0.0, left) / max(1, n - 1)
