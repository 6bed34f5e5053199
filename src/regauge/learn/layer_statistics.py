"""Plain statistics of layers, and boosted trees on them: what every net over networks is compared with."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.element import PARTS
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.learn.targets import Target
from regauge.weightspace.canonical_frame import CanonicalFrame
from regauge.weightspace.layout.compile import compile_layout

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
MEASURED_AT_ONCE = 512
"""Networks whose statistics are computed at a time."""
ITERATIONS = 200


def layer_statistics(params: Mapping[str, Tensor]) -> NDArray[np.float32]:
    """Mean, standard deviation and five quantiles of every tensor, `[models, 7 * tensors]`.

    They do not change under permutations.

    References:
        Unterthiner et al. (2020), section 4.
    """
    columns = []
    for tensor in params.values():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        values = tensor.flatten(1).cpu().double().numpy() if tensor.ndim > 1 else tensor[:, None].cpu().double().numpy()
        columns.append(np.stack([values.mean(1), values.std(1), *np.quantile(values, QUANTILES, axis=1)], 1))
    return np.concatenate(columns, 1).astype(np.float32)


def invariant_statistics(symmetry: Symmetry) -> Callable[[Params], NDArray[np.float32]]:
    """`layer_statistics` that no part of a symmetry changes.

    They are those of networks in a canonical form, in which products over the axes of invertible matrices take the
    place of their factors: of what a net over networks reads. Translations are taken out before.
    """
    layout = compile_layout(symmetry)
    frame = CanonicalFrame.of(layout, tuple(part for part in PARTS if part != "permutation"))

    def compute(params: Params) -> NDArray[np.float32]:
        params = layout.symmetry.split(params)[0] if symmetry.translations else params
        element = frame(params)
        return layer_statistics(layout.read(params if element is None else layout.symmetry.act(element, params)))

    return compute


def read_statistics(read: Callable[[NDArray[np.int64]], Params], indices: NDArray[np.int64]) -> NDArray[np.float32]:
    """`layer_statistics` of the networks with these numbers, a moderate number at a time."""
    blocks = [indices[k : k + MEASURED_AT_ONCE] for k in range(0, len(indices), MEASURED_AT_ONCE)]
    return np.concatenate([layer_statistics(read(block)) for block in blocks])


def boosted_trees(
    statistics: NDArray[np.float32], values: NDArray[Any], target: Target, *, seed: int
) -> Callable[[NDArray[np.float32]], NDArray[Any]]:
    """Fit gradient boosting to statistics of layers.

    Args:
        statistics: The statistics of the networks to learn from, `[models, statistics]`.
        values: The values that are predicted of them, as in the column.
        target: Kind of the values: numbers or classes.
        seed: The seed of the trees.

    Returns:
        A function from statistics of other networks to values.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingClassifier if target.kind == "classes" else HistGradientBoostingRegressor
    encoded = target.encode(values).numpy()
    if target.kind == "classes" and len(np.unique(encoded)) < 2:
        return lambda others: np.array([target.constant(values)] * len(others))
    trees = kind(max_iter=ITERATIONS, random_state=seed % 2**32).fit(statistics, encoded)

    def predict(others: NDArray[np.float32]) -> NDArray[Any]:
        made = trees.predict(others)
        if target.kind == "classes":
            chosen = np.empty(len(made), object)
            chosen[:] = [target.classes[k] for k in made]
            return chosen
        numbers: NDArray[Any] = made * target.deviation + target.mean if target.kind == "numbers" else made.clip(0, 1)
        return numbers

    return predict
