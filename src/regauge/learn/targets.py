"""Targets of predictors: numbers, fractions or class labels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from reprlib import repr as shorten
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch.nn import functional

from regauge.core.typed_json import require_fields
from regauge.learn.learn_configs import Kind

FEW = 5
"""Integers count as class labels if they occur at least this number of times on average."""
MOST_CLASSES = 1000
"""The largest number of classes that is detected automatically."""
FURTHEST = 1e-4
"""The smallest distance of a constant prediction of fractions from 0 and from 1, where logits would be infinite."""


@dataclass(frozen=True)
class Target:
    """A property of networks with known values, which a net learns to predict.

    Attributes:
        name: The name of the column.
        kind: "numbers", which are standardized; "fractions", such as accuracies, for which a net outputs logits; or
            "classes".
        classes: The sorted class labels in the column; empty for numbers and fractions.
        mean: The mean over the training networks, for numbers or fractions.
        deviation: The standard deviation over the training networks, for numbers or fractions.
    """

    name: str
    kind: Kind
    classes: tuple[Any, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, name: str, values: NDArray[Any], train: NDArray[Any], kind: Kind | None = None) -> "Target":
        """Return the target for the given values. Strings, booleans and recurring integers count as class labels.

        Args:
            name: The name of the column.
            values: The values of all used networks.
            train: The values of the training networks.
            kind: The kind of the target. By default, "numbers" or "classes", depending on the values.

        Raises:
            ValueError: All values are equal, the values are not numbers, or fractions are not between 0 and 1.
        """
        kind = kind or _kind_of(values)
        if kind == "classes":
            classes = tuple(sorted(set(values.tolist()), key=lambda one: (str(type(one)), one)))
            if len(classes) < 2:
                raise ValueError(
                    f"all networks have {name!r} = {classes[0]!r}, so there is nothing to predict: choose another "
                    "target"
                )
            return cls(name, kind, classes)
        if values.dtype.kind not in "iuf":
            raise ValueError(f"{name!r} has values such as {values[0]!r}, which are not numbers; predict classes")
        known = train.astype(np.float64)
        if not known.std() > 1e-12 * abs(known).max():
            raise ValueError(
                f"all training networks have {name!r} = {known[0]:g}, so there is nothing to predict: choose another "
                "target"
            )
        if kind == "fractions" and not (values.min() >= 0 and values.max() <= 1):
            raise ValueError(
                f"{name!r} has values from {values.min():g} to {values.max():g}, but fractions lie in [0, 1]; predict "
                "numbers"
            )
        return cls(name, kind, (), float(known.mean()), float(known.std()))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Target":
        """Return the target from the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: The JSON does not describe a target.
        """
        classes, rest = document["classes"], {name: value for name, value in document.items() if name != "classes"}
        if not isinstance(classes, list):
            raise ValueError(f"the classes are {shorten(classes)}, which is not a list; give a list")
        require_fields(rest, cls, "the target")
        found = cls(**rest, classes=tuple(classes))
        if any(isinstance(one, list | dict) for one in found.classes) or (found.kind == "classes") != bool(
            found.classes
        ):
            raise ValueError(f"the {found.kind} {found.name!r} have the classes {shorten(found.classes)}")
        if not math.isfinite(found.mean) or not 0 < found.deviation < math.inf:
            raise ValueError(f"{found.name!r} has the mean {found.mean} and the deviation {found.deviation}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the target as plain JSON."""
        return {**asdict(self), "classes": list(self.classes)}

    @property
    def outputs(self) -> int:
        """The number of outputs that a net has for a target."""
        return len(self.classes) if self.kind == "classes" else 1

    def encode(self, values: NDArray[Any]) -> Tensor:
        """Return the encoded values, `[networks]`: class indices (int64), fractions, or standardized numbers."""
        if self.kind == "classes":
            places = {value: k for k, value in enumerate(self.classes)}
            return torch.tensor([places[value] for value in values.tolist()])
        if self.kind == "fractions":
            return torch.from_numpy(values.astype(np.float64)).float()
        return torch.from_numpy((values.astype(np.float64) - self.mean) / self.deviation).float()

    def loss(self, outputs: Tensor, encoded: Tensor) -> Tensor:
        """Return the mean loss: cross entropy (nats) for classes and fractions, or Huber loss (delta 1) for numbers."""
        return self.losses(outputs, encoded).mean()

    def losses(self, outputs: Tensor, encoded: Tensor) -> Tensor:
        """Return the loss of each network, `[networks]`; see `loss`."""
        if self.kind == "classes":
            return functional.cross_entropy(outputs, encoded, reduction="none")
        if self.kind == "fractions":
            logits = outputs.squeeze(-1) + self._middle
            return functional.binary_cross_entropy_with_logits(logits, encoded.to(outputs), reduction="none")
        return functional.huber_loss(outputs.squeeze(-1), encoded.to(outputs), reduction="none")

    def decode(self, outputs: Tensor) -> NDArray[Any]:
        """Return predictions from outputs `[networks, outputs]`: the most probable class labels, or numbers."""
        if self.kind == "classes":
            values = np.array(self.classes) if len({type(one) for one in self.classes}) == 1 else _objects(self.classes)
            chosen: NDArray[Any] = values[outputs.argmax(-1).cpu().numpy()]
            return chosen
        if self.kind == "fractions":
            fractions: NDArray[Any] = (outputs.squeeze(-1).double() + self._middle).sigmoid().cpu().numpy()
            return fractions
        numbers: NDArray[Any] = outputs.squeeze(-1).double().cpu().numpy() * self.deviation + self.mean
        return numbers

    def score(self, predicted: NDArray[Any], measured: NDArray[Any]) -> dict[str, float]:
        """Return the accuracy for classes; for other targets, R2, Kendall's tau (b) and the mean absolute error.

        If predictions or measured values are constant, tau is 0. If measured values are constant, R2 is also 0.
        """
        if self.kind == "classes":
            return {"accuracy": float(np.mean([a == b for a, b in zip(predicted, measured, strict=True)]))}
        measured = measured.astype(np.float64)
        spread = float(((measured - measured.mean()) ** 2).sum())
        r2 = 1 - float(((predicted - measured) ** 2).sum()) / spread if spread else 0.0
        is_ordered = len(set(predicted.tolist())) > 1 and len(set(measured.tolist())) > 1
        tau = float(stats.kendalltau(predicted, measured).statistic) if is_ordered else 0.0
        return {"R2": r2, "tau": tau, "absolute error": float(abs(predicted - measured).mean())}

    def constant(self, train: NDArray[Any]) -> Any:
        """Return the best constant prediction: the most frequent class, or the mean."""
        if self.kind != "classes":
            return self.mean
        counts = torch.bincount(self.encode(train), minlength=len(self.classes))
        return self.classes[int(counts.argmax())]

    @property
    def _middle(self) -> float:
        """The logit of the mean fraction, which is a net's initial output."""
        mean = min(max(self.mean, FURTHEST), 1 - FURTHEST)
        return math.log(mean / (1 - mean))


def _kind_of(values: NDArray[Any]) -> Kind:
    if values.dtype.kind == "f":
        return "numbers"
    if values.dtype.kind in "iu":
        distinct = len(np.unique(values))
        return "classes" if distinct <= min(MOST_CLASSES, len(values) / FEW) else "numbers"
    return "classes"


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array
