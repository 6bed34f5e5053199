"""An exact test of independence: are units of two networks more alike in their order than in any other?"""

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
"""Random elements that the order of the units is compared with."""
SKETCH = 128
"""Numbers that stand for the values of a unit in one tensor; longer ones are summed up with fixed random signs."""

Load = Callable[[str], tuple[Tensor, Tensor]]
"""A tensor of both networks, by its name."""


@dataclass(frozen=True)
class Independence:
    """The outcome of the test.

    Attributes:
        p_value: The share of independent networks that look at least as alike: (1 + draws that do) / (1 + draws).
        z_score: The number of standard deviations of the null by which the statistic exceeds its mean, both exact.
        draws: The number of random elements.
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
    """Compare the order of the units in two networks with random orders; None where no group can be tested.

    The null hypothesis: the networks are independent, and one of them is as likely to have its units in any
    other order.
    The second half holds wherever units of a group are drawn alike at initialization and trained by a rule that does
    not know their numbers, as SGD and Adam. So the statistic T(a, b) of the pair is as likely to have any rank among
    T(a, g b) for uniform random orders g: the p-value is uniform, exactly, for all networks, sizes and data, trained
    alike or not. No distribution is assumed.

    T is the sum over units of the cosines of what unit i has in the first and in the second network, in each tensor.
    Only groups are reordered that have no tensor in common, as every second layer of a chain has; T is then a sum of
    one entry from each row of a matrix, which makes a draw cheap and mean and variance known. A subgroup's random
    elements are as exact as those of the whole group.

    Nothing of this holds for a network that somebody aligned to the other one: its order was chosen, and whatever
    chose it makes the p-value small.

    What the test cannot see: a copy that was moved by an element drawn at random. Its order says nothing any more, and
    what is left, the orbit, may be the same for independent networks, too, as when training has one solution. No
    test by random elements can tell these apart; see `Comparison.reference_p_value`.

    Args:
        load: Gives a tensor of both networks.
        symmetry: The symmetry, with every size known.
        names: The compared tensors.
        generator: Source of the draws.
        draws: The number of random elements; the smallest p-value is 1 / (1 + draws).

    References:
        Zhu et al. (2025), Independence tests for language models, section 3, for tests by exchangeable units of MLPs;
        Hoeffding (1951), A combinatorial central limit theorem, for mean and variance.
    """
    chosen = choose_groups(symmetry, names)
    statistic, variance = 0.0, 0.0  # Without the mean over all orders, which takes nothing from the comparison.
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
                if not is_all:  # Orders stay within classes.
                    copy[members.unsqueeze(1), members] = block
                statistic, variance = statistic + own, variance + spread
            orders = torch.rand(draws, group.size, generator=generator, device=generator.device).argsort(1).cpu()
            orders = within_classes(group, orders)
            null += copy.gather(1, orders.T).sum(0, dtype=torch.float64)
    units = sum(group.size * symmetry.count_copies(group.name) for group, _ in chosen)
    # Orders that change nothing else than rounding are as good as the given one.
    close = 1e-6 * math.sqrt(units)
    if not chosen or math.sqrt(variance) <= close:
        return None
    p_value = (1 + int((null >= statistic - close).sum())) / (1 + draws)
    names_of = tuple(group.name for group, _ in chosen)
    return Independence(p_value, statistic / math.sqrt(variance), draws, names_of)


def choose_groups(symmetry: Symmetry, names: Sequence[str]) -> list[tuple[Group, list[tuple[str, Site]]]]:
    """Return groups whose units can be reordered and that have no tensor in common, most orders first, and their
    places.

    Tensors are left out on which a group acts along several axes.
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
    """Return the direction of what each unit has, summed up in few numbers."""
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
    """Take the mean out of a matrix, which is changed; the sum over its diagonal then, and the variance over orders."""
    n, double = len(matrix), torch.float64
    matrix -= matrix.mean()
    rows, columns = (matrix.sum(axis).to(double) / n for axis in range(2))
    # Hoeffding (1951): the variance over orders is the sum of the squares, centered by rows and columns, over n - 1.
    left = dot(matrix, matrix) - n * float(rows.square().sum() + columns.square().sum())
    return float(matrix.trace()), max(0.0, left) / max(1, n - 1)
