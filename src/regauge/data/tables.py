"""Tables: features and classes that are no images."""

from dataclasses import dataclass

import torch
from torch import Tensor

BREAST_CANCER_TEST = 114
"""Cases of the breast cancer set that are kept for testing: 20%."""


@dataclass(frozen=True)
class TableData:
    """Cases with features and classes.

    Attributes:
        name: What people call it.
        train_inputs: float32, every feature with mean zero and standard deviation one, `[n, features]`.
        train_labels: int64, `[n]`.
        test_inputs: As the training inputs, shifted and scaled with their means and deviations.
        test_labels: As the training labels.
        classes: Number of classes.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int


def breast_cancer() -> TableData:
    """569 tumors with 30 features each, malignant (0) or benign (1), from the UCI repository by way of scikit-learn.

    The same 114 are always for testing.

    References:
        Street, Wolberg and Mangasarian (1993), Nuclear feature extraction for breast tumor diagnosis.
    """
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    inputs, labels = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:BREAST_CANCER_TEST], order[BREAST_CANCER_TEST:]
    normal = ((inputs - inputs[train].mean(0)) / inputs[train].std(0)).float()
    return TableData("UCI breast cancer", normal[train], labels[train], normal[test], labels[test], 2)
