"""Predictors: nets that read networks and tell a number or a class of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.learn.populations import count_networks, read_blocks, to_net
from regauge.learn.targets import Target
from regauge.learn.training import Trained
from regauge.storage.collection import Networks
from regauge.weightspace.files import load_net, save_net
from regauge.weightspace.metanet import Metanet

KIND = "predictor"


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained net that predicts one thing about networks.

        predictor = load_predictor("accuracy.safetensors")
        predictor.predict(population)

    Attributes:
        net: Its first outputs are those of the target.
        target: What is predicted.
        about: What is known about the training, as JSON: scores of the net and of what it is compared with ("scores"),
            numbers of networks ("networks"), and the settings.
        trained: The course of the training; None of one that was loaded.
        tested: Predicted and measured values of the test networks and their numbers; None of one that was loaded.
    """

    net: Metanet
    target: Target
    about: Mapping[str, Any]
    trained: Trained | None = None
    tested: Mapping[str, NDArray[Any]] | None = None

    def predict(self, networks: Networks) -> NDArray[Any]:
        """Numbers or classes as in the column that was learned, `[models]`.

        Args:
            networks: Parameters with a leading model axis, or a store, which is streamed.

        Raises:
            ValueError: They are of an architecture that the net does not read, or not finite.
        """
        return self.target.decode(self._outputs(networks))

    def probabilities(self, networks: Networks) -> Tensor:
        """The probability of each class of `target.classes`, `[models, classes]`.

        Raises:
            ValueError: Numbers are predicted, or the networks are of another architecture.
        """
        if self.target.kind != "classes":
            raise ValueError(f"{self.target.name!r} is a number, not a class; call `predict`")
        return self._outputs(networks).softmax(-1)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the predictor as one safetensors file; see `weightspace.save_net`."""
        about = {**self.about, "kind": KIND, "target": self.target.to_json()}
        return save_net(self.net, path, about=about, overwrite=overwrite)

    @torch.no_grad()
    def _outputs(self, networks: Networks) -> Tensor:
        made = []
        for indices, params in read_blocks(networks, np.arange(count_networks(networks))):
            outputs = self.net(to_net(params, self.net))[:, : self.target.outputs]
            if not bool(outputs.isfinite().all()):
                bad = indices[~outputs.isfinite().all(-1).cpu().numpy()]
                raise ValueError(
                    f"network {bad[0]} holds NaN or Inf, or values too large to be read ({len(bad)} of "
                    f"{len(indices)} do); leave them out"
                )
            made.append(outputs)
        return torch.cat(made)


def load_predictor(path: str | Path, *, module: nn.Module | None = None) -> Predictor:
    """The predictor in a file, ready to predict.

    Args:
        path: The file.
        module: The architecture of the networks, for a net with probes; files name no code that is run.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or no predictor.
    """
    net, about = load_net(path, module=module)
    if about.get("kind") != KIND:
        raise ValueError(f"{str(path)!r} is a net over networks but no predictor; `regauge learn predictor` makes one")
    try:
        target = Target.from_json(about["target"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"the predictor {str(path)!r} is damaged ({error}); train it again") from error
    return Predictor(net, target, {name: value for name, value in about.items() if name not in ("kind", "target")})
