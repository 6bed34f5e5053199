"""Predictors: nets that read networks and predict a number or a class label for each network."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.checkpoints.described import DAMAGE, damage
from regauge.core.arguments import check_arguments
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.learn.course import Trained
from regauge.learn.populations import read_blocks, to_net
from regauge.learn.targets import Target
from regauge.names import VERSION
from regauge.storage import Store
from regauge.storage.collection import Collection, Networks
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.net_files import load_net

KIND = "predictor"
NET, CONSTANT = "net", "the same for all"
"""Names of two rows in the scores: the predictor, and the best constant prediction."""
PLAIN = TREES, RIDGE, CANONICAL = (
    "statistics of layers, boosted trees",
    "statistics of layers, ridge regression",
    "canonical parameters, ridge regression",
)
"""Row names of the baselines in the scores."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained net that predicts one property of networks.

        predictor = load_predictor("accuracy.safetensors")
        predictor.predict(population)

    Attributes:
        net: The net, whose first outputs predict the target.
        target: The predicted property: its kind and its encoding.
        about: Facts about the training run, as JSON. The entry "scores" contains the scores of the net and of its
            baselines, and "networks" the numbers of networks. Further entries contain the settings.
        trained: The training history; None if the predictor was loaded from a file.
        tested: Predicted values, measured values and indices of the test networks; None if the predictor was loaded
            from a file.
    """

    net: Metanet
    target: Target
    about: Mapping[str, Any]
    trained: Trained | None = None
    tested: Mapping[str, NDArray[Any]] | None = None

    @property
    def is_informed(self) -> bool:
        """Whether the first score (accuracy or R2) is better than the score of the best constant prediction."""
        own, constant = self._first_scores
        return own > constant

    @property
    def is_best(self) -> bool:
        """Whether the first score is at least as high as the score of every baseline."""
        return self._best_plain[0] <= self._first_scores[0]

    @property
    def verdict(self) -> str:
        """A message that states whether the predictor is better than a constant prediction and than every baseline."""
        own, constant = self._first_scores
        name = next(iter(self.about["scores"][NET]))
        text = "{:.1%}" if name == "accuracy" else "{:.3g}"
        numbers = f"{name} {text.format(own)} against {text.format(constant)} on the test networks"
        if self.is_informed and self.is_best:
            return f"The predictor is better than a constant answer: {numbers}."
        if self.is_informed:
            plain, label = self._best_plain
            return (
                f"The predictor is better than a constant answer: {numbers}. But a simple baseline is even better "
                f"({label}: {text.format(plain)}). More networks, a longer training, or probes help."
            )
        how = "worse" if own < constant else "no better"
        return f"The predictor is {how} than a constant answer, so do not use it: {numbers}."

    @property
    def _best_plain(self) -> tuple[float, str]:
        """The highest first score among the baselines, and the name of that baseline."""
        scores = self.about["scores"]
        known = [(float(next(iter(scores[label].values()))), label) for label in PLAIN if label in scores]
        return max(known, default=(-math.inf, ""))

    @property
    def _first_scores(self) -> tuple[float, float]:
        scores = self.about["scores"]
        own, constant = (next(iter(scores[label].values())) for label in (NET, CONSTANT))
        return float(own), float(constant)

    def predict(self, networks: Networks | Sequence[Networks] | Collection) -> NDArray[Any]:
        """Return the predicted numbers or class labels, `[models]`, in the form of the target column.

        Args:
            networks: Parameters with a leading model axis, or a store, which is streamed; or a list of populations and
                stores. The networks in a store may have other widths than the training networks.

        Raises:
            ValueError: The net does not accept the architecture of the networks, or a network is not finite.
        """
        return self.target.decode(self._outputs(networks))

    def probabilities(self, networks: Networks | Sequence[Networks] | Collection) -> Tensor:
        """Return the probability of each class of `target.classes`, `[models, classes]`.

        Raises:
            ValueError: The target does not have classes, or the networks have another architecture.
        """
        if self.target.kind != "classes":
            raise ValueError(f"{self.target.name!r} is a number, not a class; call `predict`")
        return self._outputs(networks).softmax(-1)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the predictor as one safetensors file; see `weightspace.Metanet.save`."""
        about = {**self.about, "kind": KIND, "target": self.target.to_json()}
        return self.net.save(path, about=about, overwrite=overwrite)

    def results(self) -> dict[str, Any]:
        """Return the training history, the scores and the predictions for the test networks, as JSON.

        `regauge.report.write_page` renders these results as a page.

        Raises:
            ValueError: The predictor was loaded from a file, which has no predictions.
        """
        if self.trained is None or self.tested is None:
            raise ValueError(
                "a predictor from a file has no results; those of its training were written next to it: read that file"
            )
        return {
            "format": "regauge.predictor",
            "version": VERSION,
            "target": self.target.to_json(),
            "parts": list(self.net.parts),
            "parameters": sum(parameter.numel() for parameter in self.net.parameters()),
            **self.about,
            "verdict": self.verdict,
            "is_informed": self.is_informed,
            "is_best": self.is_best,
            "history": [dict(row) for row in self.trained.history],
            "best": self.trained.best,
            "ended": self.trained.ended,
            "tested": {name: values.tolist() for name, values in self.tested.items()},
        }

    @torch.no_grad()
    def _outputs(self, networks: Networks | Sequence[Networks] | Collection) -> Tensor:
        collection = Collection(networks)
        outputs: Tensor | None = None
        for places, params in read_blocks(collection, np.arange(len(collection))):
            symmetry = self._adapt(collection, int(collection.layout_of(places)[0]), params)
            made: Tensor = self.net(to_net(params, self.net), symmetry=symmetry)[:, : self.target.outputs]
            if not bool(made.isfinite().all()):
                bad = places[~made.isfinite().all(-1).cpu().numpy()]
                raise ValueError(
                    f"network {bad[0]} holds NaN or Inf, or values too large to be read ({len(bad)} of "
                    f"{len(places)} do); leave them out"
                )
            outputs = made.new_empty(len(collection), made.shape[1]) if outputs is None else outputs
            outputs[torch.from_numpy(places)] = made
        if outputs is None:
            raise ValueError("there are no networks for a prediction; give some")
        return outputs

    def _adapt(self, collection: Collection, layout: int, params: Params) -> Symmetry | None:
        """Adapt the net to networks with other widths. Except for widths, the layers must equal the layers of the
        training networks.

        Returns:
            The symmetry of the networks, if it is known.
        """
        symmetry = collection.symmetries[collection.first(layout)]
        if symmetry is None or self.net.reads(params, symmetry):
            return symmetry
        member = collection.members[collection.first(layout)]
        has_probes = bool(len(self.net.probes)) and isinstance(member, Store)
        module = member.architecture.module() if has_probes and isinstance(member, Store) else None
        self.net.adapt(symmetry, module)
        return symmetry


@check_arguments
def load_predictor(
    path: str | Path, *, module: nn.Module | None = None, make_module: Callable[[], nn.Module] | None = None
) -> Predictor:
    """Load a predictor from a file.

    Args:
        path: The file.
        module: The module of the networks. The module is needed for a net with probes, because files never name code to
            run.
        make_module: A function that creates the module if the net has probes. The function replaces `module`.

    Raises:
        FileNotFoundError: The file `path` does not exist.
        ValueError: The file is damaged, or does not contain a predictor.
    """
    net, about = load_net(path, module=module, make_module=make_module)
    if about.get("kind") != KIND:
        raise ValueError(f"{str(path)!r} is a net but not a predictor; `regauge learn predictor` writes one")
    try:
        target = Target.from_json(about["target"])
        rest = {name: value for name, value in about.items() if name not in ("kind", "target")}
        made = Predictor(net, target, rest)
        head = net.settings.head
        if not isinstance(head, Invariant) or head.outputs < target.outputs:
            raise ValueError(f"its target needs {target.outputs} outputs, but its net has the head {head}")
        made.verdict  # noqa: B018  # raises an error for damaged scores
    except DAMAGE as error:
        raise damage("predictor", path, error) from error
    return made
