"""The linear start of a predictor: a linear regression on statistics of networks, fitted before the training."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.learn.populations import Indices, read_blocks, spread, to_net
from regauge.learn.targets import Target
from regauge.storage.collection import Collection
from regauge.weightspace.metanet import Metanet

PENALTIES = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)
"""The penalties on squared weights that are tried, in order."""
FOLDS = 5
ITERATIONS = 30
MOST_VALUES, FEWEST = 4_000_000, 500
"""Limits for the fit: the number of features times networks, and the smallest number of networks."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""A function from outputs `[networks, outputs]` and encoded targets to the mean loss."""


def fit_start(
    net: Metanet, collection: Collection, train: Indices, target: Target, values: NDArray[np.generic]
) -> None:
    """Fit the linear regressions of a net on the training networks, one for each set of tensor shapes."""
    layouts = collection.layout_of(train)
    for layout in np.unique(layouts).tolist():
        reader = net.linear_reader(layout)
        own = spread(train[layouts == layout], max(FEWEST, MOST_VALUES // reader.weight.shape[1]))
        symmetry = collection.symmetry(layout)
        with torch.no_grad():
            found = [
                net.statistics(to_net(params, net), symmetry=symmetry).cpu()
                for _, params in read_blocks(collection, own)
            ]
        statistics = torch.cat(found)
        reader.standardize(statistics)
        features = reader.features(statistics.double().to(reader.weight.device)).cpu()
        weight, bias = fit_linear(features, target.encode(values[own]), target.loss, target.outputs)
        # Outputs that follow those of the target stay at zero.
        reader.weight[: target.outputs] = weight.to(reader.weight)
        reader.bias[: target.outputs] = bias.to(reader.bias)


def fit_linear(features: Tensor, encoded: Tensor, loss: Loss, outputs: int) -> tuple[Tensor, Tensor]:
    """Return weights `[outputs, features]` and biases that minimize the mean loss plus a penalty on squared weights.

    Cross-validation over blocks of consecutive networks chooses the penalty. If no penalty is better than zero weights,
    the weights are zero.

    Args:
        features: Standardized features in float64, `[networks, features]`.
        encoded: Encoded targets of the networks.
        loss: The mean loss.
        outputs: The number of outputs.
    """
    folds = torch.arange(len(features)) * min(FOLDS, len(features)) // len(features)
    totals = torch.zeros(len(PENALTIES) + 1, dtype=torch.float64)
    for fold in range(min(FOLDS, len(features))):
        own, others = folds != fold, folds == fold
        if not own.any():
            continue
        nothing = features.new_zeros(outputs, features.shape[1]), features.new_zeros(outputs)
        for k, (weight, bias) in enumerate([nothing, *_path(features[own], encoded[own], loss, outputs)]):
            totals[k] += loss(features[others] @ weight.T + bias, encoded[others]) * int(others.sum())
    best = int(totals.argmin())
    if not best:
        return features.new_zeros(outputs, features.shape[1]), features.new_zeros(outputs)
    return _path(features, encoded, loss, outputs, best)[-1]


def _path(
    features: Tensor, encoded: Tensor, loss: Loss, outputs: int, count: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return weights and biases for the first `count` penalties, largest penalty first. Each fit starts from the
    previous fit.

    The weights are optimized along the principal axes of the features. The axes are scaled such that all second
    derivatives of a squared error are equal, so few iterations suffice.
    """
    middle = features.mean(0)
    _, sizes, axes = torch.linalg.svd(features - middle, full_matrices=False)
    found = []
    weight, bias = features.new_zeros(outputs, len(sizes)), features.new_zeros(outputs)
    for penalty in PENALTIES[:count]:
        steps = (sizes.square() / len(features) + penalty).rsqrt()
        inputs, shrink = (features - middle) @ (axes.T * steps), penalty * steps.square() / 2
        weight, bias = _descend(inputs, encoded, loss, shrink, weight / steps, bias)
        weight = weight * steps
        found.append((weight @ axes, bias - weight @ axes @ middle))
    return found


def _descend(
    inputs: Tensor, encoded: Tensor, loss: Loss, shrink: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return weights `[outputs, inputs]` and biases that minimize the loss, starting from given weights and biases."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    search = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def evaluate() -> Tensor:
        search.zero_grad()
        value = loss(inputs @ weight.T + bias, encoded) + (shrink * weight.square()).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(evaluate)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
