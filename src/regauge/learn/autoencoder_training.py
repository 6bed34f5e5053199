"""Training of canonicalizing autoencoders: the settings, and one function from networks to an autoencoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.devices import to_device
from regauge.core.params import Params, require_finite, select
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.learn.autoencoder import Autoencoder
from regauge.learn.changes import Change, change_values, move_inputs
from regauge.learn.function_losses import FunctionLoss, SquaredError
from regauge.learn.input_layer import InputLayer
from regauge.learn.objective import Objective
from regauge.learn.populations import (
    Indices,
    Parts,
    arrays_of,
    describe_run,
    digest,
    find_usable,
    kept_unless,
    modules_of,
    read_blocks,
    split_networks,
    spread,
    to_net,
)
from regauge.learn.training import Trained, Training, Validation, train
from regauge.storage.collection import Collection, Kept, Networks
from regauge.storage.loader import Batch, Loader
from regauge.storage.store import Store
from regauge.training.settings import derive_seed
from regauge.weightspace.decoder import MLPDecoder
from regauge.weightspace.decoders import DecoderSettings
from regauge.weightspace.encoder import Values
from regauge.weightspace.heads import Invariant
from regauge.weightspace.layers import Layer
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.shares import find_readers

SAMPLE = 256
"""Networks by which values are standardized."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(Training):
    """Settings of an autoencoder: encoder, decoder, loss, training.

    Attributes:
        layer: Settings of the encoder's layers; see `regauge.weightspace.LAYERS`.
        width: The width of the encoder.
        depth: Number of its layers.
        values: The encoding of single values; standardized unless given.
        reads_moments: Whether the encoder also begins with the moments of every tensor; see `Metanet`.
        parts: What the encoder respects by construction; everything that it can unless given.
        widening: Whether a unit that is split in two counts as one, so that widening that keeps what a network computes
            changes no latent vector; see the argument `readers` of `Metanet`.
        hidden: Units of the hidden layer of its head.
        dropout: Share of these that are dropped in training.
        latent: Length of the latent vectors.
        decoder: Settings of the decoder; see `regauge.weightspace.DECODERS`.
        loss: How the outputs of a decoded network are compared with the original's: the squared error unless given, or
            the criterion of the task if there is one.
        examples: Inputs that a step reads, drawn anew for each; all unless given.
        augment: Parts of the random elements of the symmetry that move the networks in each step; for what the encoder
            does not respect.
        changes: Further random changes in each step. Motions of inputs make new networks to be decoded; what noise and
            dropped values do is not to be decoded.
    """

    layer: Layer = field(default_factory=Propagation)
    width: int = 64
    depth: int = 2
    values: Values | None = None
    reads_moments: bool = False
    parts: tuple[str, ...] | None = None
    widening: bool = False
    hidden: int | None = None
    dropout: float = 0.0
    latent: int = 128
    decoder: DecoderSettings = field(default_factory=MLPDecoder)
    loss: FunctionLoss | None = None
    examples: int | None = None
    augment: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent < 1 or (self.examples is not None and self.examples < 1):
            raise ValueError(f"latent={self.latent} and examples={self.examples} must be positive")


@check_arguments
def fit_autoencoder(
    population: Networks | Sequence[Networks] | Collection,
    symmetry: Symmetry | None = None,
    config: AutoencoderConfig | None = None,
    *,
    generator: torch.Generator,
    module: nn.Module | None = None,
    inputs: Any = None,
    task: Task | None = None,
    encoder: nn.Module | None = None,
    indices: Sequence[int] | NDArray[Any] | None = None,
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None = None,
    split_by: str | None = None,
    checkpoints: Kept = "last",
    state: Path | None = None,
    progress: Progress = no_progress,
) -> Autoencoder:
    """Train an encoder that respects the symmetry, and a decoder to networks that compute what the encoded ones do.

    All networks of an orbit have one latent vector, so the decoded network is a canonical one. The weights with the
    best validation are kept; the networks for testing are read once, at the end.

    Args:
        population: Parameters with a leading model axis, or a store, which is streamed; or several of one architecture.
            Networks of a store that are not finite are left out.
        symmetry: The symmetry of the networks; that of the store unless given.
        config: Settings; `seconds` limits the training alone.
        generator: The source of all chance, from which one number is drawn.
        module: Runs the networks; that of the store unless given.
        inputs: What networks are compared on: a tensor, a tuple of positional or a mapping of keyword arguments of the
            module, examples first.
        task: In place of `module` and `inputs`: runs the networks on its batches. Unless `config.loss` is given,
            decoded networks are trained by its criterion on its targets, whatever the originals do there.
        encoder: Reads networks in place of the net that the settings describe: a module from populations to vectors
            `[models, latent]`. Such an autoencoder cannot be saved.
        indices: Numbers of the networks to use, or a mask.
        split: Numbers of the networks for "train", "validation" and "test"; see `fit_predictor`.
        split_by: Column by which stores are divided instead of by run.
        checkpoints: Of each run of a store "last", its last checkpoint, or "all"; where neither `indices` nor `split`
            names networks.
        state: File in which the training is kept while it runs, and from which the same call continues.

    Raises:
        IndexError: There is no network of some number.
        ValueError: There are networks of several architectures, or that are not finite; a part of the split has none;
            it is not said how networks are run, they cannot be run so, or all compute the same; or the training
            diverged.

    References:
        Paper 002, section 4: an invariant encoder, an MLP as decoder, and losses by function.
    """
    config = config or AutoencoderConfig()
    collection = Collection(population, symmetry)
    if len(set(collection.layouts)) > 1:
        raise ValueError(
            f"the networks have {len(set(collection.layouts))} architectures, but a decoder makes networks of one; "
            "train an autoencoder for each"
        )
    usable = find_usable(collection, indices, kept_unless(split, checkpoints))
    parts = split_networks(collection, usable, split, split_by)
    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    fitting = _Fitting.prepare(collection, parts, config, seed, module, inputs, task, encoder)
    trained = train(
        fitting.net,
        fitting.loader,
        fitting.loss,
        fitting.validate,
        config,
        seed=seed,
        state=state,
        inputs=describe_run(
            config,
            collection,
            parts,
            seed,
            outputs=digest(*(mean.cpu() for mean in fitting.objective.mean)),
            inputs=digest(*(array for given, _ in fitting.objective.batches for array in arrays_of(given))),
        ),
        progress=progress,
    )
    return fitting.conclude(trained, generator.initial_seed())


class _Net(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, params: Params) -> Params:
        made: Params = self.decoder(self.encoder(params))
        return made


def _encoder(symmetry: Symmetry, config: AutoencoderConfig, sample: Params, seed: int) -> Metanet:
    """The net that the settings describe, with the statistics of some networks."""
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
        generator=torch.Generator().manual_seed(derive_seed(seed, "encoder")),
    )
    net.standardize(sample)
    return net


@dataclass(frozen=True, eq=False)
class _Fitting:
    """Everything that a training needs."""

    collection: Collection
    parts: Parts
    config: AutoencoderConfig
    seed: int
    net: _Net
    rest: Params
    loader: Loader
    layer: InputLayer | None
    objective: Objective

    @classmethod
    def prepare(
        cls,
        collection: Collection,
        parts: Parts,
        config: AutoencoderConfig,
        seed: int,
        module: nn.Module | None,
        inputs: Any,
        task: Task | None,
        encoder: nn.Module | None,
    ) -> "_Fitting":
        """Make the net and everything around it."""
        symmetry = collection.symmetry(0)
        for member in collection.members:
            if not isinstance(member, Store):  # which knows of each network whether it is finite
                require_finite(member, "the population")
        sample = {
            name: t.float() if t.is_floating_point() else t
            for name, t in collection.read(spread(parts["train"], SAMPLE)).items()
        }
        runs = task.module if task is not None else modules_of(collection, module)[0]
        objective = Objective.of(
            runs, inputs, task, config.loss, config.examples, to_device(sample, config.device), config.device
        )
        net = _encoder(symmetry, config, sample, seed) if encoder is None else encoder.float()
        decoder = config.decoder.build(
            symmetry.bind(select(sample, 0)), config.latent, torch.Generator().manual_seed(derive_seed(seed, "decoder"))
        )
        decoder.standardize(sample)
        decoder.begin_at(select(sample, 0))
        loader = Loader(
            collection,
            generator=torch.Generator().manual_seed(derive_seed(seed, "order")),
            batch=config.batch,
            indices=parts["train"],
            augment=config.augment,
        )
        is_moved = any(change.moves_inputs for change in config.changes)
        layer = InputLayer.find(symmetry, runs) if is_moved else None
        whole = _Net(net, decoder).to(config.device)
        rest = to_device(select(sample, 0), config.device)
        return cls(collection, parts, config, seed, whole, rest, loader, layer, objective)

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """The mean loss of a batch, whose networks are changed at random."""
        params = move_inputs(batch.params, self.config.changes, self.layer, chance)
        changed = change_values(params, self.config.changes, tuple(self.collection.symmetry(0).tied), chance)
        decoded = self.net(to_net(changed, self.net))
        return self.objective.train_loss(self._complete(decoded), to_net(params, self.net), chance)

    def validate(self) -> Validation:
        """The loss on the networks for validation."""
        scores = self._score(self.parts["validation"])
        loss = scores.pop("loss") / self.objective.scale
        return Validation((loss,), {"validation_loss": loss, **{f"validation_{k}": v for k, v in scores.items()}})

    def conclude(self, trained: Trained, given: int) -> Autoencoder:
        """The autoencoder, tested, which tells the seed that was given."""
        test = self.parts["test"]
        scores = {"autoencoder": self._score(test), "the mean output, for all": self._score(test, is_mean=True)}
        if isinstance(self.objective.loss, SquaredError):  # which has a name of its own
            scores = {label: {n: x for n, x in known.items() if n != "loss"} for label, known in scores.items()}
        about: dict[str, Any] = {
            "scores": scores,
            "networks": {name: len(part) for name, part in self.parts.items()},
            "settings": repr(self.config),
            "seed": given,
        }
        member = self.collection.members[0]
        if isinstance(member, Store):
            about["architecture"] = member.architecture.to_json()
        made = self.net.decoder(self.net.encoder(to_net(self.collection.read(test[:1]), self.net)))
        rest = {name: tensor.cpu() for name, tensor in self.rest.items() if name not in made}
        decoder = self.net.decoder.cpu().eval()
        return Autoencoder(self.net.encoder.cpu().eval(), decoder, self.config.decoder, rest, about, trained, test)

    def _complete(self, decoded: Params) -> Params:
        """Decoded networks with what is not made."""
        count = len(next(iter(decoded.values())))
        return decoded | {n: t.expand(count, *t.shape) for n, t in self.rest.items() if n not in decoded}

    @torch.no_grad()
    def _score(self, indices: Indices, *, is_mean: bool = False) -> dict[str, float]:
        """Mean scores of some networks."""
        totals: dict[str, float] = {}
        for _, params in read_blocks(self.collection, indices):
            originals = to_net(params, self.net)
            decoded = None if is_mean else self._complete(self.net(originals))
            for name, values in self.objective.measure(decoded, originals).items():
                totals[name] = totals.get(name, 0.0) + float(values.sum()) / len(indices)
        return totals
