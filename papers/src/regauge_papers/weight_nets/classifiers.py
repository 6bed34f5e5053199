"""Classifiers of networks: nets, and the baselines for comparison."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from regauge import learn
from regauge import weightspace as ws
from regauge.core.params import Params, count_models, select
from regauge.learn.input_layer import InputLayer
from regauge.learn.layer_statistics import boosted_trees, layer_statistics
from regauge.learn.random_changes import change_values, move_inputs
from regauge.learn.targets import Target
from regauge.weightspace.probes.probed import Probed
from regauge_papers.weight_nets.known import Known

Predict = Callable[[Params], NDArray[np.int64]]
BATCH = 64
"""The number of networks in a training step."""
PIECE = 500
"""The number of networks that are read at a time."""


@dataclass(frozen=True, eq=False)
class KnownCoordinates(Known):
    """Networks of coordinates with their classes, and the module that runs the networks."""

    module: nn.Module


@dataclass(frozen=True, eq=False)
class Learned:
    """A trained classifier: predicted classes, multiplications per network, and the number of times that each network
    is read.
    """

    predict: Predict
    products: float = 0.0
    epochs: float = 0.0


class Classifier(Protocol):
    """The base class of classifiers."""

    @property
    def label(self) -> str:
        """The label of the row in the table."""

    def fit(self, known: KnownCoordinates, generator: torch.Generator) -> Learned:
        """Train on networks."""


@dataclass(frozen=True)
class Net:
    """A classifier that is a net over networks."""

    label: str
    config: learn.PredictorConfig

    def fit(self, known: KnownCoordinates, generator: torch.Generator) -> Learned:
        """Train the net."""
        found = learn.fit_predictor(
            known.networks,
            known.values,
            known.symmetry,
            self.config,
            generator=generator,
            split=known.parts,
            module=known.module,
            inputs=learn.grid((28, 28)) if self.config.render or self.config.probes else None,
        )
        trained = found.trained
        assert trained is not None
        return Learned(found.predict, count_products(found.net, known.networks), trained.history[-1]["epoch"])


@dataclass(frozen=True)
class Trees:
    """A classifier by gradient boosting on statistics of layers."""

    label: str = "statistics of layers, boosted trees"

    def fit(self, known: KnownCoordinates, generator: torch.Generator) -> Learned:
        """Fit the trees."""
        values = known.values[known.fit]
        target = Target.of("class", values, values, "classes")
        seed = int(generator.initial_seed())
        trees = boosted_trees(layer_statistics(known.read(known.fit)), values, target, seed=seed)
        return Learned(lambda params: np.asarray(trees(layer_statistics(params)), np.int64))


@dataclass(frozen=True)
class Same:
    """A classifier that always returns the most frequent class."""

    label: str = "the most common class, for all"

    def fit(self, known: KnownCoordinates, generator: torch.Generator) -> Learned:
        """Count the classes."""
        classes, counts = np.unique(known.values[known.fit], return_counts=True)
        most = int(classes[counts.argmax()])
        return Learned(lambda params: np.full(len(next(iter(params.values()))), most))


@dataclass(frozen=True)
class Plain:
    """An MLP on all weights. Random elements of the group transform networks during training."""

    label: str
    seconds: float
    parts: tuple[str, ...]
    width: int = 512

    def fit(self, known: KnownCoordinates, generator: torch.Generator) -> Learned:
        """Train the net."""
        names = list(known.networks)
        chosen = torch.from_numpy(known.parts["train"])
        whole = _flatten(select(known.networks, chosen), names)
        mean, deviation = whole.mean(0), whole.std(0).clamp(min=1e-6)
        mlp = _mlp(whole.shape[1], self.width, int(known.values.max()) + 1, generator)

        def read(params: Params) -> Tensor:
            return (_flatten(params, names) - mean) / deviation

        return _train(mlp, read, self.parts, known, self.seconds, generator)


@dataclass(frozen=True)
class Activations:
    """An MLP on ordered activations of all units at learned inputs, which uses sines but not the group."""

    label: str
    seconds: float
    parts: tuple[str, ...]
    count: int = 16
    width: int = 512

    def fit(self, known: KnownCoordinates, generator: torch.Generator) -> Learned:
        """Train the net."""
        points = learn.grid((28, 28))
        points = points[torch.randperm(len(points), generator=generator)[: self.count]]
        layout = ws.compile_layout(known.symmetry)
        probed = Probed.of(known.module, layout, {"0": points}, ("0",), count=self.count, outputs=None)
        numbers = sum(layout.units[reading.units].sizes[-1] * reading.channels for reading in probed.readings)
        net = _Activations(probed, points, _mlp(numbers, self.width, int(known.values.max()) + 1, generator))

        return _train(net, lambda params: params, self.parts, known, self.seconds, generator)


class _Activations(nn.Module):
    def __init__(self, probed: Probed, points: Tensor, mlp: nn.Module) -> None:
        super().__init__()
        self.probed, self.inputs, self.mlp = probed, nn.Parameter(points.clone()), mlp

    def forward(self, params: Params) -> Tensor:
        read, _ = self.probed.run(params, {"0": self.inputs})
        outputs: Tensor = self.mlp(torch.cat([made.flatten(1) for made in read], 1))
        return outputs


def _mlp(inputs: int, width: int, classes: int, generator: torch.Generator) -> nn.Module:
    sizes = [inputs, width, width, classes]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        linear = nn.Linear(a, b)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(b, a, generator=generator) * (2 / a) ** 0.5)
            linear.bias.zero_()
        layers += [linear, nn.LayerNorm(b), nn.SiLU(), nn.Dropout(0.2)] if b != classes else [linear]
    return nn.Sequential(*layers)


def _move(params: Params, known: KnownCoordinates, parts: tuple[str, ...], generator: torch.Generator) -> Params:
    """Transform networks by random elements of the group, and transform their inputs as in the training of nets."""
    changes = (learn.Translation(0.1), learn.Rotation(10.0), learn.Scaling(0.1))
    layer = InputLayer.find(known.symmetry, known.module)
    shifted = change_values(move_inputs(params, changes, layer, generator), changes, (), generator)
    return known.symmetry.act(known.symmetry.random(generator, parts, (count_models(params),)), shifted)


def _train(
    net: nn.Module,
    read: Callable[[Params], Any],
    parts: tuple[str, ...],
    known: KnownCoordinates,
    seconds: float,
    generator: torch.Generator,
) -> Learned:
    """Train for some CPU seconds with AdamW, and keep the weights with the best validation."""
    train, values = known.parts["train"], torch.from_numpy(known.values)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.02)
    best, kept, began, steps = -1.0, dict(net.state_dict()), time.process_time(), 0

    @torch.no_grad()
    def predict(params: Params) -> NDArray[np.int64]:
        net.eval()
        count = len(next(iter(params.values())))
        made = [net(read(select(params, slice(k, k + PIECE)))).argmax(-1) for k in range(0, count, PIECE)]
        return torch.cat(made).numpy()

    validation = known.read(known.parts["validation"])
    for epoch in _epochs(train, generator):
        net.train()
        for rows in epoch:
            spent = (time.process_time() - began) / seconds
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, 20 * spent + 0.04, max(0.01, 1.01 - spent))
            outputs = net(read(_move(select(known.networks, rows), known, parts, generator)))
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(outputs, values[rows]))
            optimizer.step()
            steps += 1
        accuracy = float((predict(validation) == known.values[known.parts["validation"]]).mean())
        if accuracy > best:
            best, kept = accuracy, {name: t.clone() for name, t in net.state_dict().items()}
        if time.process_time() - began > seconds:
            break
    net.load_state_dict(kept)
    sample = read(select(known.networks, slice(1)))
    return Learned(predict, _count(lambda: net.eval()(sample)), steps * BATCH / len(train))


def _epochs(train: NDArray[np.int64], generator: torch.Generator) -> Iterator[Sequence[Tensor]]:
    while True:
        order = torch.from_numpy(train)[torch.randperm(len(train), generator=generator)]
        yield torch.split(order[: max(1, len(order) // BATCH) * BATCH], BATCH)


def _flatten(params: Params, names: Sequence[str]) -> Tensor:
    return torch.cat([params[name].flatten(1) for name in names], 1)


def count_products(net: nn.Module, networks: Params) -> float:
    """Return the number of multiplications of a net for one network."""
    sample = select(networks, slice(1))
    return _count(lambda: net.eval()(sample))


@torch.no_grad()
def _count(run: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops()) / 2
