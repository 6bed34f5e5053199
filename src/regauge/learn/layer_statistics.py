"""Plain statistics of layers under boosted trees: what every net over networks is compared with."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.params import Params
from regauge.learn.targets import Target

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
BLOCK = 512
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


def boosted_trees(
    read: Callable[[NDArray[np.int64]], Params],
    target: Target,
    values: NDArray[Any],
    train: NDArray[np.int64],
    test: NDArray[np.int64],
    *,
    seed: int,
) -> NDArray[Any]:
    """Predictions for test networks by gradient boosting on layer statistics, trained on other networks.

    Args:
        read: From numbers of networks to their parameters.
        target: What is predicted.
        values: Its values for all networks.
        train: Numbers of the networks that trees are fitted to.
        test: Numbers of the networks that are predicted.
        seed: Of the trees.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    def features(indices: NDArray[np.int64]) -> NDArray[np.float32]:
        blocks = [indices[k : k + BLOCK] for k in range(0, len(indices), BLOCK)]
        return np.concatenate([layer_statistics(read(block)) for block in blocks])

    kind = HistGradientBoostingClassifier if target.kind == "classes" else HistGradientBoostingRegressor
    trees = kind(max_iter=ITERATIONS, random_state=seed % 2**32)
    encoded = target.encode(values[train]).numpy()
    if target.kind == "classes" and len(np.unique(encoded)) < 2:
        return np.array([target.constant(values[train])] * len(test))
    made = trees.fit(features(train), encoded).predict(features(test))
    if target.kind == "numbers":
        numbers: NDArray[Any] = made * target.deviation + target.mean
        return numbers
    chosen = np.empty(len(made), object)
    chosen[:] = [target.classes[k] for k in made]
    return chosen
