"""How predictors are trained: the settings, and one function from networks and targets to a predictor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.learn.changes import Change, change_values, move_inputs
from regauge.learn.input_layer import InputLayer
from regauge.learn.layer_statistics import boosted_trees, read_statistics
from regauge.learn.populations import (
    Indices,
    Parts,
    arrays_of,
    digest,
    modules_of,
    read_blocks,
    split_networks,
    spread,
    to_device,
    to_net,
    values_of,
)
from regauge.learn.predictor import Predictor
from regauge.learn.rendering import Rendering
from regauge.learn.targets import Kind, Target
from regauge.learn.training import Trained, Training, Validation, train
from regauge.storage.collection import Collection, Networks
from regauge.storage.loader import Batch, Loader
from regauge.training.settings import derive_seed
from regauge.weightspace.encoder import Values
from regauge.weightspace.heads import Invariant
from regauge.weightspace.layers import Layer
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.probes import Probes
from regauge.weightspace.shares import find_readers

SAMPLE = 1024
"""Networks by which values are standardized."""


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(Training):
    """Settings of a predictor: its net, its training, and how networks are varied.

    Attributes:
        layer: Settings of the net's layers; see `regauge.weightspace.LAYERS`.
        width: Of the net.
        depth: Number of layers.
        values: How single values are encoded; standardized unless given.
        reads_moments: Whether the net also begins with the moments of every tensor; see `Metanet`.
        parts: What the net respects by construction; everything that it can unless given.
        widening: Whether a unit that is split in two, its outgoing weights divided among the copies, counts as one; see
            `weightspace.shares`.
        hidden: Units of the hidden layer of the head.
        dropout: Share of these that are dropped in training.
        kind: Whether the targets are numbers, classes, or fractions such as accuracies, which are learned by cross
            entropy and stay in [0, 1]; numbers or classes, as they are, unless given.
        augment: Parts of the random elements of the symmetry that move the networks in each step; for what the net does
            not respect.
        changes: Further random changes in each step.
        render: Weight of a second loss in training: the net predicts, besides the target, what the network that it
            reads computes at fixed inputs (mean squared error of standardized outputs). Zero for none.
        probes: Number of learned inputs that the net runs the networks on; zero for none.
        statistics: Whether boosted trees on plain statistics of layers are fitted too, to compare with.
    """

    layer: Layer = field(default_factory=Propagation)
    width: int = 64
    depth: int = 4
    values: Values | None = None
    reads_moments: bool = False
    parts: tuple[str, ...] | None = None
    widening: bool = False
    hidden: int | None = None
    dropout: float = 0.0
    kind: Kind | None = None
    augment: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    render: float = 0.0
    probes: int = 0
    statistics: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.render < float("inf"):
            raise ValueError(f"render={self.render} is no weight of a loss; it is at least 0, and 0 means none")
        if self.probes < 0:
            raise ValueError(f"probes={self.probes} is no number of inputs; it is at least 0, and 0 means none")
        # Settings that make no net, such as heads that do not divide the width, are told before anything is read.
        axes: dict[str, tuple[str | None, ...]] = {"first": ("units", None), "second": (None, "units")}
        smallest = Symmetry.from_axes(axes).bind({"first": torch.zeros(2, 1), "second": torch.zeros(1, 2)})
        Metanet(
            smallest,
            layer=self.layer,
            head=Invariant(1, self.hidden, self.dropout),
            width=self.width,
            depth=min(self.depth, 1),
            values=self.values,
            readers=find_readers(smallest) if self.widening else (),
            reads_moments=self.reads_moments,
        )


def fit_predictor(
    population: Networks | Sequence[Networks] | Collection,
    targets: str | Sequence[Any] | NDArray[Any] | Tensor,
    symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
    config: PredictorConfig | None = None,
    *,
    generator: torch.Generator,
    indices: Sequence[int] | NDArray[Any] | None = None,
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None = None,
    split_by: str | None = None,
    module: nn.Module | Sequence[nn.Module] | None = None,
    inputs: Any = None,
    state: Path | None = None,
    progress: Progress = no_progress,
) -> Predictor:
    """Train a net to predict a number or a class of networks; the weights with the best validation are kept.

    Networks that are not finite or have no target are left out. The networks for testing are read once, at the end.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or several, of one or several
            architectures, whose networks are numbered one after the other.
        targets: A value for each network, or the name of a column of the stores.
        symmetry: Of the networks, or of each store and population; those of the stores unless given.
        config: Settings; `seconds` limits the training alone.
        generator: The source of all chance, from which one number is drawn.
        indices: Numbers of the networks to use, or a mask; all unless given.
        split: Numbers of the networks for "train", "validation" and "test". Unless given, a store is divided by run,
            with its own test networks where it has a column "split" with some; of a population fixed random networks
            are taken: 80%, 10% and 10%.
        split_by: Column by which stores are divided instead of by run, such as one that names the image of which there
            are several networks: those with one value are in one part.
        module: Runs the networks, where they are rendered, probed or their inputs moved, for each layout; that of the
            store unless given.
        inputs: What networks are rendered at, and what probes begin as: a tensor, a tuple of positional or a mapping
            of keyword arguments of the module.
        state: File in which the training is kept while it runs, and from which the same call continues.

    Raises:
        IndexError: There is no network of some number.
        KeyError: There is no such column.
        ValueError: There is nothing to predict, a part of the split has no networks, something is missing that the
            settings need, or the training diverged.
    """
    config = config or PredictorConfig()
    collection = Collection(population, symmetry)
    name, values, usable = values_of(collection, targets, indices)
    parts = split_networks(collection, usable, split, split_by)
    used = np.concatenate(list(parts.values()))
    target = Target.of(name, values[used], values[parts["train"]], config.kind)
    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    fitting = _Fitting.prepare(collection, target, values, parts, config, seed, module, inputs)
    trained = train(
        fitting.net,
        fitting.loader,
        fitting.loss,
        fitting.validate,
        config,
        seed=seed,
        state=state,
        inputs={
            "settings": repr(config),
            "target": target.to_json(),
            "values": digest(values[used], used),
            "networks": collection.key,
            "seed": seed,
            "inputs": None if inputs is None else digest(*arrays_of(inputs)),
        },
        progress=progress,
    )
    return fitting.conclude(trained, progress)


@dataclass(frozen=True, eq=False)
class _Fitting:
    """Everything that a training needs."""

    collection: Collection
    target: Target
    values: NDArray[Any]
    parts: Parts
    config: PredictorConfig
    seed: int
    net: Metanet
    loader: Loader
    layers: tuple[InputLayer | None, ...]
    renderings: tuple[Rendering, ...]

    @classmethod
    def prepare(
        cls,
        collection: Collection,
        target: Target,
        values: NDArray[Any],
        parts: Parts,
        config: PredictorConfig,
        seed: int,
        module: nn.Module | Sequence[nn.Module] | None,
        inputs: Any,
    ) -> "_Fitting":
        """Make the net and everything around it."""
        layouts = range(max(collection.layouts) + 1)
        symmetries = [collection.symmetry(k) for k in layouts]
        there = collection.layout_of(parts["train"])
        if missing := [k for k in layouts if not (there == k).any()]:
            first = collection.first(missing[0])
            raise ValueError(
                f"none of the networks for training has the architecture of store or population {first + 1}; take more "
                "of its networks, or leave it out"
            )
        samples = [collection.read(spread(parts["train"][there == k], SAMPLE)) for k in layouts]
        is_moved = any(change.moves_inputs for change in config.changes)
        modules: Sequence[nn.Module] = ()
        if is_moved or config.render or config.probes:
            modules = modules_of(collection, module)
        if inputs is None and (config.render or config.probes):
            raise ValueError("`render` and `probes` need to know what the networks are run on; give `inputs`")
        renderings = (
            tuple(_rendering(*pair, inputs, config) for pair in zip(modules, samples, strict=True))
            if config.render
            else ()
        )
        outputs = {_count_outputs(rendering) for rendering in renderings}
        if len(outputs) > 1:
            raise ValueError(
                f"networks of different architectures give {sorted(outputs)} numbers at the inputs, and one net cannot "
                "render all; leave `render` out"
            )
        net = Metanet(
            symmetries,
            layer=config.layer,
            head=Invariant(target.outputs + sum(outputs), config.hidden, config.dropout),
            width=config.width,
            depth=config.depth,
            values=config.values,
            parts=config.parts,
            readers=find_readers(symmetries) if config.widening else (),
            reads_moments=config.reads_moments,
            probes=[_probes(one, inputs, config.probes) for one in modules] if config.probes else None,
            generator=torch.Generator().manual_seed(derive_seed(seed, "net")),
        )
        for sample in samples:
            net.standardize(sample)
        loader = Loader(
            collection,
            generator=torch.Generator().manual_seed(derive_seed(seed, "order")),
            batch=config.batch,
            indices=parts["train"],
            augment=config.augment,
        )
        layers = [InputLayer.find(*pair) for pair in zip(symmetries, modules, strict=True)] if is_moved else []
        return cls(
            collection, target, values, parts, config, seed, net.to(config.device), loader, tuple(layers), renderings
        )

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """The mean loss of a batch, whose networks are changed at random."""
        changes, target = self.config.changes, self.target
        layer = self.layers[batch.layout] if self.layers else None
        params = move_inputs(batch.params, changes, layer, chance)
        changed = change_values(params, changes, tuple(self.collection.symmetry(batch.layout).tied), chance)
        outputs = self.net(to_net(changed, self.net))
        encoded = target.encode(self.values[batch.indices]).to(outputs.device)
        loss = target.loss(_first(outputs, target), encoded)
        if self.renderings:
            made = outputs[:, target.outputs :]
            # What noise and dropped values did to the function is not to be predicted.
            loss = loss + self.config.render * functional.mse_loss(
                made, self.renderings[batch.layout](to_net(params, self.net)).to(made)
            )
        return loss

    def validate(self) -> Validation:
        """The loss on the networks for validation, and their scores."""
        indices = self.parts["validation"]
        outputs = self._read(indices)
        measured = self.values[indices]
        loss = float(self.target.loss(outputs, self.target.encode(measured).to(outputs.device)))
        scores = self.target.score(self.target.decode(outputs), measured)
        order = (1 - scores["accuracy"], loss) if self.target.kind == "classes" else (loss,)
        return Validation(order, {"validation_loss": loss, **{f"validation_{k}": v for k, v in scores.items()}})

    def conclude(self, trained: Trained, progress: Progress) -> Predictor:
        """The predictor, tested."""
        test, fit = self.parts["test"], np.concatenate([self.parts["train"], self.parts["validation"]])
        measured = self.values[test]
        with torch.no_grad():
            predicted = self.target.decode(self._read(test))
        scores = {"net": self.target.score(predicted, measured)}
        if self.config.statistics:
            advance = progress("statistics", 1)
            trees = self._boosted(fit, test)
            scores["statistics of layers, boosted trees"] = self.target.score(trees, measured)
            advance(1)
        constant = np.array([self.target.constant(self.values[fit])] * len(test))
        scores["the same for all"] = self.target.score(constant, measured)
        about = {
            "scores": scores,
            "networks": {name: len(part) for name, part in self.parts.items()},
            "settings": repr(self.config),
            "seed": self.seed,
        }
        tested = {"networks": test, "predicted": predicted, "measured": measured}
        return Predictor(self.net.cpu().eval(), self.target, about, trained, tested)

    def _read(self, indices: Indices) -> Tensor:
        outputs = torch.empty(len(indices), self.target.outputs, device=self.config.device)
        for places, params in read_blocks(self.collection, indices):
            outputs[torch.from_numpy(places)] = _first(self.net(to_net(params, self.net)), self.target)
        return outputs

    def _boosted(self, fit: Indices, test: Indices) -> NDArray[Any]:
        """What boosted trees on statistics of layers say about test networks; trees of their own for each layout."""
        made = np.empty(len(test), object if self.target.kind == "classes" else np.float64)
        of_fit, of_test = self.collection.layout_of(fit), self.collection.layout_of(test)
        for layout in np.unique(of_test):
            known, others = (
                read_statistics(self.collection.read, part) for part in (fit[of_fit == layout], test[of_test == layout])
            )
            trees = boosted_trees(known, self.values[fit[of_fit == layout]], self.target, seed=self.seed)
            made[of_test == layout] = trees(others)
        return made


def _rendering(module: nn.Module, sample: Params, inputs: Any, config: PredictorConfig) -> Rendering:
    """How networks are run, with the statistics of some."""
    rendering = Rendering(module.to(config.device), to_device(inputs, config.device))
    run = {name: t.float() if t.is_floating_point() else t for name, t in sample.items()}  # as the net reads them
    return rendering.standardize(to_device(run, config.device))


def _first(outputs: Tensor, target: Target) -> Tensor:
    """The outputs of the target; those of the rendering follow them."""
    return outputs[:, : target.outputs]


def _count_outputs(rendering: Rendering) -> int:
    return rendering.mean.numel() if isinstance(rendering.mean, Tensor) else 0


def _probes(module: nn.Module, inputs: Any, count: int) -> Probes:
    """Learned inputs that begin as some of the given ones."""
    if isinstance(inputs, Mapping):
        return Probes(module, (), inputs, count)
    return Probes(module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, count)
