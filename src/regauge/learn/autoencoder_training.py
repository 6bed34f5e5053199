"""Training of canonicalizing autoencoders: a function that trains an autoencoder on networks, and its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.devices import to_device
from regauge.core.params import Params, require_finite, select
from regauge.core.progress import Progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.learn.autoencoder import Autoencoder
from regauge.learn.course import Trained, Validation
from regauge.learn.division import Division, FitArguments
from regauge.learn.fitting import Fitting
from regauge.learn.function_losses import Criterion, SquaredError
from regauge.learn.input_layer import InputLayer
from regauge.learn.learn_configs import AutoencoderConfig
from regauge.learn.objective import Objective
from regauge.learn.populations import Indices, arrays_of, digest, modules_of, read_blocks, to_net
from regauge.learn.random_changes import change_values, move_inputs
from regauge.storage import Store
from regauge.storage.collection import Collection, Networks
from regauge.storage.loader import Batch, Loader
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.shares import find_readers

SAMPLE = 256
"""The number of networks whose statistics standardize the inputs."""
VALIDATED = 4
"""Validation compares each network on at most as many inputs as this number of training steps. If training steps use
few inputs, validation on all inputs takes longer than training.
"""


@check_arguments
def fit_autoencoder(
    population: Networks | Sequence[Networks] | Collection,
    symmetry: Symmetry | None = None,
    config: AutoencoderConfig | None = None,
    *,
    module: nn.Module | None = None,
    inputs: Any = None,
    task: Task | None = None,
    encoder: nn.Module | None = None,
    generator: torch.Generator | None = None,
    **arguments: Unpack[FitArguments],
) -> Autoencoder:
    """Train an encoder that is invariant, and a decoder whose networks compute the functions of the encoded networks.

    All networks of an orbit have the same latent vector, and are therefore decoded to the same network. The result has
    the weights of the epoch with the best validation. The test networks are evaluated only once, at the end.
    `about["verdict"]` states whether the training budget was sufficient, that is, whether decoded networks are close
    enough to the encoded networks.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or a list of populations and
            stores with one architecture.
        symmetry: The symmetry of the networks. Default: the symmetry of the store.
        config: Settings. `seconds` limits only the training time, by the clock unless `is_cpu_time`.
        module: The module that evaluates the networks. Default: the module of the store.
        inputs: The inputs on which networks are compared: a tensor, a tuple of positional arguments, or a dictionary of
            keyword arguments for the module. The first axis of each input indexes the examples.
        task: A task that replaces `module` and `inputs`. Networks are evaluated on the batches of the task. By default,
            decoded networks are trained with the criterion and the targets of the task, without the outputs of the
            original networks. If `config.loss` is given, it replaces the criterion.
        encoder: A module that maps populations to vectors `[models, latent]`. A given encoder replaces the net that the
            settings describe. An autoencoder with a given encoder cannot be saved.
        generator: The random generator from which one seed is sampled. Default: a generator with seed 0.
        arguments: `indices`, `split`, `split_by`, `checkpoints`, `state` and `progress`; see
            `regauge.learn.division.FitArguments`.

    Raises:
        IndexError: An index is out of range.
        ValueError: The networks have several architectures, or are not finite. A split has no networks. The caller gave
            neither `module` and `inputs` nor `task`. The networks cannot be evaluated, or all networks compute the same
            function. The error is also raised if the training diverged.

    References:
        Paper 002, section 4: an invariant encoder, an MLP as decoder, and losses by function.
    """
    config, collection = config or AutoencoderConfig(), Collection(population, symmetry)
    if len(set(collection.layouts)) > 1:
        raise ValueError(
            f"the networks have {len(set(collection.layouts))} architectures, but a decoder is for one; train an "
            "autoencoder for each"
        )
    division = Division.of(collection, generator, **arguments)
    return AutoencoderFitting.prepare(division, config, module, inputs, task, encoder).fit(arguments)


class _Net(nn.Module):
    """A module that consists of an encoder and a decoder."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, params: Params) -> Params:
        made: Params = self.decoder(self.encoder(params))
        return made


def _encoder(symmetry: Symmetry, config: AutoencoderConfig, sample: Params, chance: torch.Generator) -> Metanet:
    """Return the encoder that the settings describe, initialized with the statistics of some networks."""
    net = Metanet(
        symmetry,
        layer=config.layer,
        head=Invariant(config.latent, config.hidden, config.dropout),
        width=config.width,
        depth=config.depth,
        values=config.values,
        parts=config.parts,
        reads_moments=config.reads_moments,
        readers=find_readers(symmetry) if config.widening else (),
        generator=chance,
    )
    net.standardize(sample)
    return net


@dataclass(frozen=True, eq=False)
class AutoencoderFitting(Fitting[Autoencoder]):
    """The training of an autoencoder.

    `rest` holds the tensors that the decoder does not generate. `checked` is the objective for validation.
    """

    division: Division
    config: AutoencoderConfig
    net: _Net
    loader: Loader
    rest: Params
    layer: InputLayer | None
    objective: Objective
    checked: Objective
    known: Mapping[str, Any]

    @classmethod
    def prepare(
        cls,
        division: Division,
        config: AutoencoderConfig,
        module: nn.Module | None,
        inputs: Any,
        task: Task | None,
        encoder: nn.Module | None,
    ) -> "AutoencoderFitting":
        """Return a training run with a new net, its data and its loss."""
        collection = division.collection
        symmetry = collection.symmetry(0)
        for member in collection.members:
            if not isinstance(member, Store):  # stores record which networks are finite
                require_finite(member, "the population")
        sample = {name: t.float() if t.is_floating_point() else t for name, t in division.samples(SAMPLE)[0].items()}
        runs = task.module if task is not None else modules_of(collection, module)[0]
        objective = Objective.of(
            runs, inputs, task, config.loss, config.examples, to_device(sample, config.device), config.device
        )
        net = _encoder(symmetry, config, sample, division.chance("encoder")) if encoder is None else encoder.float()
        first = select(sample, 0)
        decoder = config.decoder.build(symmetry.bind(first), config.latent, division.chance("decoder"))
        decoder.standardize(sample)
        decoder.begin_at(first)
        is_moved = any(change.moves_inputs for change in config.changes)
        layer = InputLayer.find(symmetry, runs) if is_moved else None
        whole = _Net(net, decoder).to(config.device)
        loader = division.loader(config.batch, augment=config.augment)
        known = {
            "outputs": digest(*(mean.cpu() for mean in objective.mean)),
            "inputs": digest(*(array for given, _ in objective.batches for array in arrays_of(given))),
        }
        checked = objective.sampled(VALIDATED, division.chance("validation inputs"))
        return cls(division, config, whole, loader, to_device(first, config.device), layer, objective, checked, known)

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """Return the mean loss of a batch, after random changes of its networks."""
        params = move_inputs(batch.params, self.config.changes, self.layer, chance)
        changed = change_values(params, self.config.changes, tuple(self.division.collection.symmetry(0).tied), chance)
        decoded = self.net(to_net(changed, self.net))
        return self.objective.train_loss(self._complete(decoded), to_net(params, self.net), chance)

    def validate(self) -> Validation:
        """Return the loss on the validation networks."""
        scores = self._score(self.division.parts["validation"], self.checked)
        loss = scores.pop("loss") / self.objective.scale
        return Validation((loss,), {"validation_loss": loss, **{f"validation_{k}": v for k, v in scores.items()}})

    def conclude(self, trained: Trained, progress: Progress) -> Autoencoder:
        """Return the autoencoder, with its scores on the test networks."""
        collection, test = self.division.collection, self.division.parts["test"]
        of_test = partial(self._score, test, self.objective)
        scores = {"autoencoder": of_test(), "the mean output, for all": of_test(is_mean=True)}
        if isinstance(self.objective.loss, SquaredError):  # the same number has another name
            scores = {label: {n: x for n, x in known.items() if n != "loss"} for label, known in scores.items()}
        about: dict[str, Any] = {"scores": scores, **self.division.about(self.config)}
        if not isinstance(self.objective.loss, Criterion):
            about |= _judge(*scores.values())
        member = collection.members[0]
        if isinstance(member, Store):
            about["architecture"] = member.architecture.to_json()
        made = self.net.decoder(self.net.encoder(to_net(collection.read(test[:1]), self.net)))
        rest = {name: tensor.cpu() for name, tensor in self.rest.items() if name not in made}
        decoder = self.net.decoder.cpu().eval()
        return Autoencoder(self.net.encoder.cpu().eval(), decoder, self.config.decoder, rest, about, trained, test)

    def _complete(self, decoded: Params) -> Params:
        """Return decoded networks together with the tensors that the decoder does not generate."""
        count = len(next(iter(decoded.values())))
        return decoded | {n: t.expand(count, *t.shape) for n, t in self.rest.items() if n not in decoded}

    @torch.no_grad()
    def _score(self, indices: Indices, objective: Objective, *, is_mean: bool = False) -> dict[str, float]:
        """Return the mean scores of some networks by an objective."""
        totals: dict[str, float] = {}
        for _, params in read_blocks(self.division.collection, indices):
            originals = to_net(params, self.net)
            decoded = None if is_mean else self._complete(self.net(originals))
            for name, values in objective.measure(decoded, originals).items():
                totals[name] = totals.get(name, 0.0) + float(values.sum()) / len(indices)
        return totals


def _judge(own: Mapping[str, float], constant: Mapping[str, float]) -> dict[str, Any]:
    """Return whether the error of decoded networks is at most half of a control's error, and a message that states the
    errors.

    For squared errors and divergences, the bound is a quarter of the control's error.
    """
    name = next(name for name in ("accuracy error", "loss", "squared error") if name in own)
    most, share, whose = (
        (0.5, "half", "one accuracy for all") if name == "accuracy error" else (0.25, "a quarter", "the mean output")
    )
    is_near = own[name] <= most * constant[name]
    numbers = f"{name} {own[name]:.3g} against {constant[name]:.3g} of {whose}, on the test networks"
    verdict = f"Decoded networks have nearly the same outputs as the encoded ones: {numbers}."
    if not is_near:
        verdict = (
            f"Decoded networks differ too much from the encoded ones ({share} of the second error is the limit): "
            f"{numbers}. More epochs or seconds, more networks, or a longer latent vector help."
        )
    return {"verdict": verdict, "is_near": is_near}
