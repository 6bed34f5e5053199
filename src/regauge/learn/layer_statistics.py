"""Simple features of networks and simple models that read these features: the baselines for every net over networks."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.canonical.canonicalize import canonicalize
from regauge.core.element import PARTS
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.learn.targets import Target
from regauge.weightspace.canonical_frame import CanonicalFrame
from regauge.weightspace.layout.compile import compile_layout

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
MEASURED_AT_ONCE = 512
"""The number of networks whose statistics are computed at a time."""
ITERATIONS = 200
PENALTIES = np.logspace(-3, 6, 19)


def layer_statistics(params: Mapping[str, Tensor]) -> NDArray[np.float32]:
    """Return mean, standard deviation and five quantiles of every tensor, `[models, 7 * tensors]`.

    Permutations of units do not change the statistics.

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
    """Return a function that computes `layer_statistics` of the canonical forms of networks.

    The symmetry does not change the returned statistics. Nets over networks read the same canonical form. If any
    invertible matrix can be inserted between two matrices, the canonical form contains only the product of the two
    matrices. Translations are removed first.
    """
    layout = compile_layout(symmetry)
    frame = CanonicalFrame.of(layout, tuple(part for part in PARTS if part != "permutation"))

    def compute(params: Params) -> NDArray[np.float32]:
        params = layout.symmetry.split(params)[0] if symmetry.translations else params
        element = frame(params)
        return layer_statistics(layout.read(params if element is None else layout.symmetry.act(element, params)))

    return compute


def read_features(
    read: Callable[[NDArray[np.int64]], Params],
    indices: NDArray[np.int64],
    features: Callable[[Params], NDArray[np.float32]] = layer_statistics,
) -> NDArray[np.float32]:
    """Return features of the networks with the given indices, computed in batches."""
    blocks = [indices[k : k + MEASURED_AT_ONCE] for k in range(0, len(indices), MEASURED_AT_ONCE)]
    return np.concatenate([features(read(block)) for block in blocks])


def canonical_values(params: Params, symmetry: Symmetry) -> NDArray[np.float32]:
    """Return all parameters of the canonical form of each network as one row, `[networks, values]`."""
    canonical = canonicalize(params, symmetry)
    values = [t.flatten(1) if t.ndim > 1 else t[:, None] for t in canonical.values() if t.is_floating_point()]
    return torch.cat([one.float().cpu() for one in values], 1).numpy()


Read = Callable[[NDArray[np.float32]], NDArray[Any]]
"""A function from features of networks, `[models, features]`, to predicted values of the target column."""


def boosted_trees(features: NDArray[np.float32], values: NDArray[Any], target: Target, *, seed: int) -> Read:
    """Fit boosted trees that predict the target from features of networks, such as layer statistics."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingClassifier if target.kind == "classes" else HistGradientBoostingRegressor
    return _fit(kind(max_iter=ITERATIONS, random_state=seed % 2**32), features, values, target)


def ridge_regression(features: NDArray[np.float32], values: NDArray[Any], target: Target) -> Read:
    """Fit a ridge regression to standardized features; generalized cross-validation chooses the penalty."""
    from sklearn.linear_model import RidgeClassifierCV, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    kind = RidgeClassifierCV if target.kind == "classes" else RidgeCV
    return _fit(make_pipeline(StandardScaler(), kind(PENALTIES)), features, values, target)


def _fit(estimator: Any, features: NDArray[np.float32], values: NDArray[Any], target: Target) -> Read:
    """Fit a scikit-learn estimator."""
    encoded = target.encode(values).numpy()
    if target.kind == "classes" and len(np.unique(encoded)) < 2:
        return lambda others: np.array([target.constant(values)] * len(others))
    fitted = estimator.fit(features, encoded)

    def predict(others: NDArray[np.float32]) -> NDArray[Any]:
        made = fitted.predict(others)
        if target.kind == "classes":
            chosen = np.empty(len(made), object)
            chosen[:] = [target.classes[k] for k in made]
            return chosen
        numbers: NDArray[Any] = made * target.deviation + target.mean if target.kind == "numbers" else made.clip(0, 1)
        return numbers

    return predict
