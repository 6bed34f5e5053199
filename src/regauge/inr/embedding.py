"""Embeddings of INRs: an encoder maps a network to a code, and a decoder reconstructs the signal from the code."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import Params, below, require_finite
from regauge.core.progress import Progress, no_progress
from regauge.inr.fields.signal_samples import Samples
from regauge.inr.fit_config import FitConfig
from regauge.inr.fitting import loss_for
from regauge.inr.representation import Inr
from regauge.nets.classification import initialize
from regauge.training import AdamW, DescentConfig, OneCycle, Optimizer, Schedule, differentiate, minimize
from regauge.training.descent import OnStep, training_mode
from regauge.weightspace.row_encoder import RowEncoder, weight_rows

ENCODED_AT_ONCE = 16
"""The number of networks that are encoded at once."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(DescentConfig):
    """Settings for training an embedding: AdamW with a one-cycle learning rate, in epochs over the networks.

    A batch consists of at least two networks, because batch normalization needs rows of several networks. The defaults
    are from De Luigi et al., for thousands of networks of width 512.

    Attributes:
        examples: Number of samples of each network in a step, drawn again for every step, with replacement.
        octaves: Number of frequencies by which the decoder encodes each coordinate.

    References:
        De Luigi et al. (2023), appendix.
    """

    epochs: float | None = 300
    batch: int | None = 16
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=1e-4))
    schedule: Schedule = field(default_factory=lambda: OneCycle(momentum=(0.85, 0.95)))
    examples: int = 10_000
    code: int = 1024
    widths: tuple[int, ...] = (512, 512, 1024, 1024)
    width: int = 512
    octaves: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.examples, self.code, self.width, self.octaves, *self.widths) <= 0 or self.batch == 1:
            raise ValueError(f"{self} cannot train: a batch needs two networks, and sizes and examples are positive")


class CodeDecoder(nn.Module):
    """The decoder `f(code, x)`, a ReLU MLP on the code and on sines and cosines of the point.

    The point is encoded as (x, sin(2^k x), cos(2^k x)) for k below `octaves`. In the middle of the MLP, the ReLU of a
    second linear map of the input is added to the hidden features.

    References:
        De Luigi et al. (2023), section 3 and appendix: 2,165,249 parameters for points in space.
    """

    def __init__(self, coordinates: int, outputs: int, code: int = 1024, width: int = 512, octaves: int = 10) -> None:
        super().__init__()
        inputs = code + coordinates * (1 + 2 * octaves)
        self.octaves = octaves
        self.first = nn.Linear(inputs, width)
        self.before = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.again = nn.Linear(inputs, width)
        self.after = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, outputs)

    def forward(self, codes: Tensor, points: Tensor) -> Tensor:
        """Decode codes `[networks, code]` at `[networks, points, coordinates]` to `[networks, points, outputs]`."""
        angles = points.unsqueeze(-1) * 2.0 ** torch.arange(self.octaves, dtype=points.dtype, device=points.device)
        places = torch.cat([points, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        inputs = torch.cat([codes.unsqueeze(1).expand(-1, points.shape[1], -1), places], -1)
        x = torch.relu(self.first(inputs))
        for layer in self.before:
            x = torch.relu(layer(x))
        x = x + torch.relu(self.again(inputs))
        for layer in self.after:
            x = torch.relu(layer(x))
        outputs: Tensor = self.last(x)
        return outputs


@dataclass(frozen=True)
class Embedding:
    """A trained encoder and decoder for INRs."""

    inr: Inr  # architecture of the networks
    encoder: RowEncoder
    decoder: CodeDecoder
    losses: Tensor  # of every step, `[steps]`

    def codes(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the codes `[networks, code]` of a population, or `[code]` of one network.

        Raises:
            ValueError: The sizes of the networks differ from the sizes of the training networks.
        """
        rows = weight_rows(params, "hidden")
        if rows.shape[-1] != self.encoder.columns:
            raise ValueError(
                f"the encoder reads networks of width {self.encoder.columns}, not {rows.shape[-1]}; train an "
                "encoder for these"
            )
        with torch.no_grad():
            many = rows.reshape(-1, *rows.shape[-2:]).to(self.encoder.last.weight)
            found = torch.cat([self.encoder(part) for part in torch.split(many, ENCODED_AT_ONCE)])
        return found.reshape(*rows.shape[:-2], -1)

    def distance(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> float:
        """Return the Euclidean distance between the codes of two networks.

        References:
            Paper 003, section 3.3 and figure 3.4.
        """
        return float((self.codes(params_a) - self.codes(params_b)).double().norm())

    def decode(self, code: Tensor, points: Tensor) -> Tensor:
        """Decode a code at points `[n, in]` to outputs `[n, out]`, which approximate the network's outputs."""
        with torch.no_grad():
            return self.decoder(code.unsqueeze(0), points.to(code).unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]


@check_arguments
def train_embedding(
    inr: Inr,
    params: Mapping[str, Tensor],
    samples: Sequence[Samples],
    config: EmbeddingConfig | None = None,
    *,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> Embedding:
    """Train an encoder and a decoder on fitted networks. The decoder must reproduce a network's outputs from its code.

    The encoder reads only the layers between hidden layers, and is not invariant under permutations. For the networks
    of the paper, the encoder suffices, because all networks have the same initialization.

    Args:
        params: The networks, `[networks, ...]`.
        samples: Samples of each network's signal, with the same number for all networks.
        generator: The random generator for the initialization, the order of networks and the samples of a step.
            Default: a generator with seed 0.
        on_step: A function that is called after each step with the step number, loss and rate, as a
            `regauge.training.State`.

    Raises:
        ValueError: The numbers of networks and samples differ, or a network contains NaN or Inf.

    References:
        De Luigi et al. (2023), section 3; paper 003, section 3.3.
    """
    generator = given_or_seed(generator)
    config = config or EmbeddingConfig()
    require_finite(params, "the population")
    rows = weight_rows(params, "hidden")
    if rows.ndim != 3 or len(rows) != len(samples) or len(rows) < 2:
        raise ValueError(
            f"there are networks with rows {list(rows.shape)} and {len(samples)} sets of samples; give a population of "
            "at least two networks, and the samples of each"
        )
    if len({tuple(one.points.shape) for one in samples}) != 1:
        raise ValueError("the networks have different numbers of samples; give the same number for each")
    points, labels = (torch.stack([getattr(one, field) for one in samples]).to(rows) for field in ("points", "labels"))
    encoder = RowEncoder(rows.shape[-1], config.code, config.widths)
    decoder = CodeDecoder(inr.in_features, inr.out_features, config.code, config.width, config.octaves)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    model.load_state_dict(initialize(model, generator))
    model.to(rows)
    loss_of = loss_for(FitConfig(), inr)
    # The last networks of an epoch are left out where they are too few for a batch.
    batch = min(config.batch or len(rows), len(rows))
    whole = len(rows) // batch * batch

    def loss(weights: Params, chosen: Tensor) -> Tensor:
        index = torch.randint(points.shape[1], (batch, config.examples), generator=generator)
        at = chosen.unsqueeze(1)
        codes = torch.func.functional_call(encoder, below("encoder.", weights), (rows[chosen],))
        outputs = torch.func.functional_call(decoder, below("decoder.", weights), (codes, points[at, index]))
        return loss_of(outputs, labels[at, index]).mean()

    def batches() -> Iterator[Tensor]:
        while True:
            yield from torch.split(torch.randperm(len(rows), generator=generator)[:whole], batch)

    with training_mode(model):
        found = minimize(
            differentiate(loss),
            dict(model.named_parameters()),
            batches(),
            config,
            examples=whole,
            progress=progress,
            label="training the encoder",
            on_step=on_step,
        )
    model.load_state_dict(found.params, strict=False)
    model.eval().requires_grad_(False)
    return Embedding(inr, encoder, decoder, found.losses)
