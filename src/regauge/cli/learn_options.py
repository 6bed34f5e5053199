"""Options of the commands that train nets over networks. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.config_options import with_settings
from regauge.cli.options import BATCHES_HELP, Json, Loss, Output, Seed
from regauge.cli.store_options import KeptCheckpoints, Where
from regauge.cli.trained_net_options import LearnDecode, LearnEncode, LearnNearest, LearnPredict
from regauge.learn.learn_configs import AutoencoderConfig, MatchingConfig, PooledConfig, PredictorConfig

TRAINING = "epochs batch lr weight_decay patience seconds device"
"""Settings of every training."""

Parts = Annotated[tuple[Literal["permutation", "sign", "scale", "shift", "linear"], ...], arg(metavar="PART ...")]
INPUTS_HELP = (
    "Inputs of the networks, for --render and --probes. For networks of coordinates: grid:28x28 (pixel centers in "
    f"[-1, 1]^2). For other networks, data: {BATCHES_HELP}The inputs of the first 512 examples are used."
)
COMPARED_HELP = (
    "Inputs at which networks are compared. For networks of coordinates: grid:28x28 (pixel centers in [-1, 1]^2) or "
    f"points:4096x3 (random points in [-1, 1]^3). For other networks, data: {BATCHES_HELP}The inputs of "
    "the first 512 examples are used."
)
LAYER_HELP = (
    "Kind of the net's layers: propagation, message_passing, nfn, dws, relational_attention, or another of "
    "regauge.weightspace.LAYERS."
)


@dataclass(frozen=True, kw_only=True)
class Varied:
    """Settings of random changes of the networks in each training step."""

    augment: Parts = ()
    """Parts of the symmetry, not in --parts, that the net learns from random elements, applied in each step."""
    translate: float = 0.0
    """For networks of coordinates: shift the inputs along each axis by at most this distance."""
    rotate: float = 0.0
    """For networks of coordinates: rotate the inputs by at most this number of degrees."""
    scale: float = 0.0
    """For networks of coordinates: multiply the inputs by a factor that differs from 1 by at most this number."""
    noise: float = 0.0
    """Standard deviation of noise on all weights, relative to the root mean square of each tensor."""
    drop: float = 0.0
    """Set this share of the weights to zero, chosen at random in each step."""


@dataclass(frozen=True, kw_only=True)
class LearnRun:
    """Settings for the commands that train a net: the networks, the training and the output."""

    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of stores, of one or several architectures."),
    ]
    output: Output
    """File of the net, .safetensors. The report has the same name with .html, and its numbers with .json."""
    where: Where = ()
    checkpoints: KeptCheckpoints = "last"
    seed: Seed = 0
    resume: bool = False
    """Continue an interrupted training with the same settings."""
    overwrite: bool = False
    """Replace the output, its report, and the state of an interrupted training, if they exist."""
    split_by: Annotated[str, arg(metavar="COLUMN")] = ""
    """Split the networks by this column instead of by run: networks with the same value are in the same part. If
    several runs fitted networks to one signal, the default is the column "signal"."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
@with_settings(PooledConfig, "moments=reads_moments widening")
class LearnNet(LearnRun):
    """Settings of a net that reads networks, and the choice of its training networks."""

    layer: Annotated[str, arg(metavar="LAYER", help=LAYER_HELP)] = "propagation"
    layer_settings: Annotated[str, arg(metavar="JSON")] = "{}"
    """Settings of the layers as JSON, for example '{"channels": 8}'."""
    fourier: int = 0
    """Encode each value with this number of sines and cosines."""
    logarithms: bool = False
    """Encode values by the logarithms of their absolute values, for networks that differ by orders of magnitude."""
    parts: Parts = ()
    """Parts of the symmetry that the net respects by construction; by default all. permutation is always included."""
    varied: Annotated[Varied, arg(name="")] = Varied()


@dataclass(frozen=True, kw_only=True)
@with_settings(PredictorConfig, f"width depth dropout kind render linear statistics {TRAINING}")
class LearnPredictor(LearnNet):
    """Train a net that reads networks to predict a column of a store: a number such as an accuracy, or a class.

    Networks are split by run, or by a column "split" of the store. Several stores are used together, even if their
    architectures differ. For comparison, boosted trees are fitted to statistics of the layers. An interrupted training
    continues with --resume.
    """

    target: Annotated[str, arg(metavar="COLUMN")]
    """The column that is predicted; `regauge zoo info STORE` lists the columns of a store."""
    inputs: Annotated[str, arg(metavar="GRID|DATA", help=INPUTS_HELP)] = ""
    probes: Annotated[str, arg(metavar="N|NxN")] = "0"
    """Run the networks on this number of learned inputs, and read the outputs. The learned inputs are initialized with
    some of --inputs. With 16x16, the learned inputs lie on a grid, and convolutions read the outputs. With --depth, the
    net also reads weights; both predictions are averaged with the weight that is best in validation."""


@dataclass(frozen=True, kw_only=True)
@with_settings(AutoencoderConfig, f"width depth dropout latent examples {TRAINING}")
class LearnAutoencoder(LearnNet):
    """Train an autoencoder of networks: one net maps each orbit to a vector, another net maps vectors to networks.

    The decoded networks are trained to have the same outputs as the encoded networks at the inputs. Networks are split
    by run, or by a column "split" of the store. An interrupted training continues with --resume.
    """

    inputs: Annotated[str, arg(metavar="GRID|POINTS|DATA", help=COMPARED_HELP)] = ""
    decoder: Literal["mlp", "template"] = "mlp"
    """Decoder from vectors to networks. mlp: an MLP that outputs all parameters. template: a learned network, which an
    equivariant net changes depending on the vector."""
    decoder_widths: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Widths of the hidden layers of the decoder mlp; by default 256 and 512."""
    loss: Literal["squared-error", "distillation"] = "squared-error"
    """Loss between the outputs of the encoded and the decoded network: the squared error, or, for logits of
    classifiers, the divergence of softened probabilities."""
    temperature: float = 1.0
    """Number by which --loss distillation divides logits."""
    color: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Column that colors the points in the map of latent vectors in the report."""


@dataclass(frozen=True, kw_only=True)
@with_settings(MatchingConfig, f"width depth vectors probes supervised line line_by distance checked {TRAINING}")
class LearnMatching(LearnRun):
    """Train a net that finds which units of two networks correspond: a method for `align` and `merge`.

    With --data, the net learns to align networks such that the loss on the line between them is low, and validation
    also measures the loss halfway. An interrupted training continues with --resume.
    """

    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of stores of one architecture; the widths may differ."),
    ]
    output: Output
    """File of the matcher, .safetensors, for the option --matcher of other commands."""
    data: Annotated[str, arg(metavar="DATA", help=f"Data on which networks are run: {BATCHES_HELP}Optional.")] = ""
    loss: Loss = "cross-entropy"
    examples: int = 128
    """Number of examples in a step, for data from a file."""
    layer: Annotated[str, arg(metavar="LAYER", help=LAYER_HELP)] = "propagation"
    pair_by: Annotated[str, arg(metavar="COLUMN")] = ""
    """Only align networks that have the same value in this column, such as networks fitted to one signal."""


LearnCommand = (
    Annotated[LearnPredictor, subcommand("predictor", prefix_name=False)]
    | Annotated[LearnPredict, subcommand("predict", prefix_name=False)]
    | Annotated[LearnAutoencoder, subcommand("autoencoder", prefix_name=False)]
    | Annotated[LearnEncode, subcommand("encode", prefix_name=False)]
    | Annotated[LearnDecode, subcommand("decode", prefix_name=False)]
    | Annotated[LearnNearest, subcommand("nearest", prefix_name=False)]
    | Annotated[LearnMatching, subcommand("matching", prefix_name=False)]
)


@dataclass(frozen=True)
class Learn:
    """Nets whose inputs are networks: train a predictor, an autoencoder or a matcher, and use it."""

    command: LearnCommand
