"""Training of predictors: a function that trains a predictor on networks and targets, and its training stages."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from regauge.checkpoints.state_file import StateFile
from regauge.core.arguments import check_arguments
from regauge.core.devices import to_device
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import arguments
from regauge.learn.course import Trained, Validation
from regauge.learn.division import Division, FitArguments
from regauge.learn.fitting import Fitting
from regauge.learn.input_layer import InputLayer
from regauge.learn.layer_statistics import (
    boosted_trees,
    canonical_values,
    layer_statistics,
    read_features,
    ridge_regression,
)
from regauge.learn.learn_configs import PredictorConfig
from regauge.learn.linear_start import FEWEST, MOST_VALUES, fit_start
from regauge.learn.populations import Indices, arrays_of, digest, modules_of, read_blocks, spread, to_net, values_of
from regauge.learn.predictor import CANONICAL, CONSTANT, NET, PLAIN, TREES, Predictor
from regauge.learn.random_changes import change_values, move_inputs
from regauge.learn.rendering import Rendering, grid
from regauge.learn.targets import Target
from regauge.learn.training import train
from regauge.storage.collection import Collection, Networks
from regauge.storage.loader import Batch, Loader
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.probes.probes import Probes
from regauge.weightspace.shares import find_readers

SAMPLE = 1024
"""The number of networks whose statistics standardize the inputs."""
SHARES = tuple(k / 20 for k in range(21))
"""Candidate weights in an average of two predictions, such as the predictions of the probe reader and of the weight
reader."""
HIDDEN = 512
"""The width of the net that reads outputs at probes."""
LEAST_SECONDS = 1e-3
"""The time in seconds that remains for the weight reader if the probe reader has used all the time."""
Stage = Literal["probes", "weights"]
"""The component that is trained: the reader of outputs at probes, or the reader of weights while the probes are
frozen."""


@check_arguments
def fit_predictor(
    population: Networks | Sequence[Networks] | Collection,
    targets: str | Sequence[Any] | NDArray[Any] | Tensor,
    symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
    config: PredictorConfig | None = None,
    *,
    module: nn.Module | Sequence[nn.Module] | None = None,
    inputs: Any = None,
    generator: torch.Generator | None = None,
    **arguments: Unpack[FitArguments],
) -> Predictor:
    """Train a net to predict a number or a class label of networks, and keep the weights with the best validation.

    Networks that are not finite or have no target are left out. The test networks are evaluated only once, at the end.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or a list of populations and
            stores, with one or several architectures. In a list, indices number the networks of all entries
            consecutively.
        targets: A value for each network, or the name of a column of the stores.
        symmetry: The symmetry of the networks, or a list with one symmetry per store and population. Default: the
            symmetries of the stores.
        config: Settings. `seconds` limits only the training time, by the clock unless `is_cpu_time`.
        module: The module that evaluates the networks, for each layout. Default: the module of the store. The module is
            needed for `render` and `probes` in the settings, and for changes that transform inputs.
        inputs: The fixed inputs for `render`, which are also the initial probes: a tensor, a tuple of positional
            arguments, or a dictionary of keyword arguments for the module.
        generator: The random generator from which one seed is sampled. Default: a generator with seed 0.
        arguments: `indices`, `split`, `split_by`, `checkpoints`, `state` and `progress`; see
            `regauge.learn.division.FitArguments`.

    Raises:
        IndexError: An index is out of range.
        KeyError: The stores have no column with the name of the target or of the split.
        ValueError: No network has a target, or a split has no networks. An argument that the settings require is
            missing. The error is also raised if the training diverged.
    """
    config, collection = config or PredictorConfig(), Collection(population, symmetry)
    name, values, usable = values_of(collection, targets, **arguments)
    division = Division.of(collection, generator, usable, **arguments)
    used, train = np.concatenate(list(division.parts.values())), division.parts["train"]
    target = Target.of(name, values[used], values[train], config.kind)
    return PredictorFitting.prepare(division, config, target, values, module, inputs).fit(arguments)


@dataclass(frozen=True, eq=False)
class PredictorFitting(Fitting[Predictor]):
    """The training of a predictor. `layers` and `renderings` have one entry for each set of tensor shapes."""

    division: Division
    config: PredictorConfig
    net: Metanet
    loader: Loader
    target: Target
    values: NDArray[Any]
    layers: tuple[InputLayer | None, ...]
    renderings: tuple[Rendering, ...]
    known: Mapping[str, Any]
    stage: Stage = "weights"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the training: first the probe reader, then the weight reader, if the net has both."""
        stages: tuple[Stage, ...] = ("probes", "weights")
        return stages[not self.config.probes : 2 if self.config.layers else 1]

    @classmethod
    def prepare(
        cls,
        division: Division,
        config: PredictorConfig,
        target: Target,
        values: NDArray[Any],
        module: nn.Module | Sequence[nn.Module] | None,
        inputs: Any,
    ) -> "PredictorFitting":
        """Return a training run with a new net, its data and its loss."""
        collection, samples = division.collection, division.samples(SAMPLE)
        symmetries = [collection.symmetry(k) for k in range(len(samples))]
        is_moved = any(change.moves_inputs for change in config.changes)
        modules: Sequence[nn.Module] = ()
        if is_moved or config.render or config.probes:
            modules = modules_of(collection, module)
        if inputs is None and (config.render or config.probes):
            raise ValueError("`render` and `probes` need inputs of the networks; give `inputs`")
        renderings = (
            tuple(_rendering(*pair, inputs, config) for pair in zip(modules, samples, strict=True))
            if config.render
            else ()
        )
        outputs = {_count_outputs(rendering) for rendering in renderings}
        if len(outputs) > 1:
            raise ValueError(
                f"networks of different architectures give {sorted(outputs)} numbers at the inputs, so one net cannot "
                "predict them; leave `render` out"
            )
        net = Metanet(
            symmetries,
            layer=config.layer,
            head=Invariant(target.outputs + sum(outputs), config.hidden, config.dropped),
            width=config.width,
            depth=config.layers,
            values=config.values,
            parts=config.parts,
            readers=find_readers(symmetries) if config.widening else (),
            reads_moments=config.reads_moments,
            is_linear=config.linear and not config.widening,
            probes=[_probes(one, inputs, config) for one in modules] if config.probes else None,
            generator=division.chance("net"),
        )
        for sample, symmetry in zip(samples, symmetries, strict=True):
            net.standardize(sample, symmetry)
        loader = division.loader(config.batch, augment=config.augment)
        layers = [InputLayer.find(*pair) for pair in zip(symmetries, modules, strict=True)] if is_moved else []
        used = np.concatenate(list(division.parts.values()))
        known = {
            "target": target.to_json(),
            "values": digest(values[used]),
            "inputs": None if inputs is None else digest(*arrays_of(inputs)),
        }
        net = net.to(config.device)
        if net.settings.is_linear:
            fit_start(net, collection, division.parts["train"], target, values)
        return cls(division, config, net, loader, target, values, tuple(layers), renderings, known)

    def train(self, arguments: FitArguments) -> Trained:
        """Train the stages one after the other. A resumed training run continues with the remaining stages."""
        config, stages, before, state = self.config, self.stages, [], arguments.get("state")
        if state is not None and len(stages) > 1:
            before = StateFile(state).read_inputs().get("before", [])
        resumed = len(before)
        for number in range(resumed, len(stages)):
            is_last, spent = number == len(stages) - 1, sum(part["history"][-1]["seconds"] for part in before)
            left = config.seconds and (max(config.seconds - spent, LEAST_SECONDS) if is_last else config.seconds / 2)
            part = replace(self, stage=stages[number])
            with part.freeze():
                trained = train(
                    *(self.net, self.loader, part.loss, part.validate, replace(config, seconds=left)),
                    seed=self.division.seed + number,
                    state=state,
                    continues=number == resumed,
                    inputs={**self.inputs, "before": before},
                    progress=arguments.get("progress", no_progress),
                    on_step=arguments.get("on_step"),
                )
            if not is_last:
                before = [*before, {"history": [dict(row) for row in trained.history], "best": trained.best}]
        return trained.after([row for part in before for row in part["history"]])

    @contextmanager
    def freeze(self) -> Iterator[None]:
        """Freeze the probes while the weight reader is trained."""
        learned = [p for name, p in self.net.named_parameters() if ".learned." in name and self.stage == "weights"]
        for parameter in learned:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in learned:
                parameter.requires_grad_(True)

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """Return the mean loss of a batch, after random changes of its networks."""
        changes, target = self.config.changes, self.target
        layer = self.layers[batch.layout] if self.layers else None
        params = move_inputs(batch.params, changes, layer, chance)
        changed = change_values(params, changes, tuple(self.division.collection.symmetry(batch.layout).tied), chance)
        outputs = self._answer(to_net(changed, self.net), symmetry=self.division.collection.symmetry(batch.layout))
        encoded = target.encode(self.values[batch.indices]).to(outputs.device)
        loss = target.loss(_first(outputs, target), encoded)
        if self.renderings:
            made = outputs[:, target.outputs :]
            # The targets are the outputs before noise and dropped weights.
            loss = loss + self.config.render * functional.mse_loss(
                made, self.renderings[batch.layout](to_net(params, self.net)).to(made)
            )
        return loss

    def validate(self) -> Validation:
        """Return the loss on the validation networks, and their scores.

        The validation also chooses two shares in the averaged prediction. The first share is the weight of the probe
        reader, relative to the weight reader. The second share is the weight of the linear regression on statistics,
        relative to the net. The regression gets the largest share for which the validation loss is at most one standard
        error above the smallest loss. The regression is favored because the net is the best of several epochs on the
        same validation networks.

        References:
            Breiman et al. (1984), Classification and Regression Trees, section 3.4.3: the rule of one standard error.
        """
        outputs = self._read(self.division.parts["validation"], self._answer)
        if self.stage == "weights" and self.config.probes:
            outputs = self._mix(outputs, self._read(self.division.parts["validation"], self.net.read_probes), "share")
        if self.net.settings.is_linear:
            outputs = self._mix(outputs, self._linear_outputs, "linear_share", errors=1.0)
        loss = float(self.target.loss(outputs, self._kept))
        scores = self.target.score(self.target.decode(outputs), self.values[self.division.parts["validation"]])
        facts = {"validation_loss": loss, **{f"validation_{name}": value for name, value in scores.items()}}
        return Validation(self._order(outputs), facts)

    def _mix(self, made: Tensor, others: Tensor, share: str, errors: float = 0.0) -> Tensor:
        """Return a weighted mean of two outputs for the validation networks. The weighted mean is not worse than
        `others` alone.

        With `errors`, the weight of `others` is the largest weight whose loss exceeds the smallest loss by at most
        `errors` standard errors. The net stores the weight of the mix in the buffer `share`.
        """
        means = [torch.lerp(made, others, one) for one in SHARES]
        orders, losses = [self._order(one) for one in means], [self.target.losses(one, self._kept) for one in means]
        able = [k for k, order in enumerate(orders) if order <= orders[-1]] or [len(SHARES) - 1]
        best = min(able, key=lambda k: (orders[k], -k))
        above = {k: (losses[k] - losses[best]).double() for k in able}
        near = [k for k, x in above.items() if x.mean() <= errors * x.std(correction=0) / len(x) ** 0.5]
        self.net.get_buffer(share).fill_(SHARES[max(near)] if errors else SHARES[best])
        return means[max(near) if errors else best]

    def _order(self, outputs: Tensor) -> tuple[float, ...]:
        """Return the key that ranks outputs for the validation networks; smaller is better."""
        loss = float(self.target.loss(outputs, self._kept))
        if self.target.kind != "classes":
            return (loss,)
        return 1 - float((outputs.argmax(-1) == self._kept).double().mean()), loss

    @cached_property
    def _kept(self) -> Tensor:
        """The encoded targets of the validation networks."""
        return self.target.encode(self.values[self.division.parts["validation"]]).to(self.config.device)

    @cached_property
    def _linear_outputs(self) -> Tensor:
        """The predictions of the linear regressions for the validation networks. Training of the net does not change
        the predictions of the regressions.
        """
        return self._read(self.division.parts["validation"], self.net.read_linear)

    def conclude(self, trained: Trained, progress: Progress) -> Predictor:
        """Return the predictor, with its scores on the test networks."""
        parts = self.division.parts
        test, fit = parts["test"], np.concatenate([parts["train"], parts["validation"]])
        measured = self.values[test]
        with torch.no_grad():
            predicted = self.target.decode(self._read(test, self.net))
        scores = {NET: self.target.score(predicted, measured)}
        if self.config.statistics:
            advance = progress("plain readers", len(PLAIN))
            for name, made in self._read_plainly(fit, test):
                scores[name] = self.target.score(made, measured)
                advance(1)
        constant = np.array([self.target.constant(self.values[fit])] * len(test))
        scores[CONSTANT] = self.target.score(constant, measured)
        about = {"scores": scores, **self.division.about(self.config)}
        tested = {"networks": test, "predicted": predicted, "measured": measured}
        return Predictor(self.net.cpu().eval(), self.target, about, trained, tested)

    @property
    def _answer(self) -> Callable[..., Tensor]:
        """The component of the net that the current stage trains."""
        return self.net.read_probes if self.stage == "probes" else self.net.read_weights

    def _read(self, indices: Indices, answer: Callable[..., Tensor]) -> Tensor:
        outputs = torch.empty(len(indices), self.target.outputs, device=self.config.device)
        collection = self.division.collection
        for places, params in read_blocks(collection, indices):
            symmetry = collection.symmetry(int(collection.layout_of(indices[places[:1]])[0]))
            outputs[torch.from_numpy(places)] = _first(answer(to_net(params, self.net), symmetry=symmetry), self.target)
        return outputs

    def _read_plainly(self, fit: Indices, test: Indices) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield predictions of the baselines for the test networks. Each set of tensor shapes has separate
        baselines.
        """
        target, collection = self.target, self.division.collection
        of_fit, of_test = collection.layout_of(fit), collection.layout_of(test)
        trees = partial(boosted_trees, seed=self.division.seed)
        for name in PLAIN:
            made = np.empty(len(test), object if target.kind == "classes" else np.float64)
            for layout in np.unique(of_test).tolist():
                own = partial(canonical_values, symmetry=collection.symmetry(layout))
                features = own if name == CANONICAL else layer_statistics
                known, others = fit[of_fit == layout], test[of_test == layout]
                width = features(collection.read(known[:1])).shape[1]
                known = spread(known, max(FEWEST, MOST_VALUES // width))
                learned = read_features(collection.read, known, features)
                reader = (trees if name == TREES else ridge_regression)(learned, self.values[known], target)
                made[of_test == layout] = reader(read_features(collection.read, others, features))
            yield name, made


def _rendering(module: nn.Module, sample: Params, inputs: Any, config: PredictorConfig) -> Rendering:
    """Return a rendering of networks, standardized by the outputs of some networks."""
    rendering = Rendering(module.to(config.device), to_device(inputs, config.device))
    run = {name: t.float() if t.is_floating_point() else t for name, t in sample.items()}  # as the net reads them
    return rendering.standardize(to_device(run, config.device))


def _first(outputs: Tensor, target: Target) -> Tensor:
    """Return the first outputs of the net, which predict the target. All further outputs predict the networks' outputs
    at fixed inputs.
    """
    return outputs[:, : target.outputs]


def _count_outputs(rendering: Rendering) -> int:
    return rendering.mean.numel() if isinstance(rendering.mean, Tensor) else 0


def _probes(module: nn.Module, inputs: Any, config: PredictorConfig) -> Probes:
    """Return learnable probes, initialized with some inputs. If the settings give a grid shape, inputs that are vectors
    are replaced by a grid over their range.
    """
    sizes = config.probes
    is_points = isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.ndim == 2
    if not isinstance(sizes, int) and is_points and inputs.shape[1] == len(sizes) and len(inputs) != math.prod(sizes):
        low, high = inputs.amin(0), inputs.amax(0)
        inputs = low + (high - low) * (grid(sizes).to(inputs) + 1) / 2
    return Probes(module, *arguments(inputs), sizes, hidden=config.hidden or HIDDEN, dropout=config.dropped)
