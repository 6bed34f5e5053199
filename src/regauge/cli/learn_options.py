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
    "Inputs of the networks, for --render and --probes: grid:28x28, the centers of pixels over [-1, 1]^2, for networks "
    f"of coordinates. Or data: {BATCHES_HELP}The inputs of their first 512 examples are used."
)
COMPARED_HELP = (
    "Inputs at which networks are compared: grid:28x28, the centers of pixels over [-1, 1]^2, for networks of "
    f"coordinates; points:4096x3, random points of [-1, 1]^3. Or data: {BATCHES_HELP}The inputs "
    "of their first 512 examples are used."
)
LAYER_HELP = (
    "Kind of the net's layers: propagation, message_passing, nfn, dws, relational_attention, or another of "
    "regauge.weightspace.LAYERS."
)


@dataclass(frozen=True, kw_only=True)
class Varied:
    """Random changes of networks in each step of the training."""

    augment: Parts = ()
    """Parts of the symmetry by whose random elements networks are moved, where --parts leaves some out."""
    translate: float = 0.0
    """Shift the inputs of networks of coordinates by up to so much along each axis, which changes their first layer."""
    rotate: float = 0.0
    """Rotate these inputs by up to this number of degrees."""
    scale: float = 0.0
    """Multiply these inputs by a factor that differs from 1 by up to so much."""
    noise: float = 0.0
    """Add noise to all weights, as a share of the root mean square of each tensor."""
    drop: float = 0.0
    """Set this share of the weights to zero."""


@dataclass(frozen=True, kw_only=True)
class LearnRun:
    """The networks, the training and the output of a net, for the commands that train one."""

    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of stores, of one or several architectures."),
    ]
    output: Output
    """File of the net, which ends in .safetensors; the report gets the same name with .html, its numbers with .json."""
    where: Where = ()
    checkpoints: KeptCheckpoints = "last"
    seed: Seed = 0
    resume: bool = False
    """Continue an interrupted training with the same settings."""
    overwrite: bool = False
    """Replace the output, and its report if there is one, and the state of an interrupted training."""
    split_by: Annotated[str, arg(metavar="COLUMN")] = ""
    """Divide the networks by this column instead of by run: those with one value there are in one part. Networks that
    several runs fitted to one signal are divided by the column "signal" where left out."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
@with_settings(PooledConfig, "moments=reads_moments widening")
class LearnNet(LearnRun):
    """A net that reads networks, and on which networks it is trained."""

    layer: Annotated[str, arg(metavar="LAYER", help=LAYER_HELP)] = "propagation"
    layer_settings: Annotated[str, arg(metavar="JSON")] = "{}"
    """Settings of the layers as JSON, for example '{"channels": 8}'."""
    fourier: int = 0
    """Encode each value with this number of sines and cosines."""
    logarithms: bool = False
    """Encode values with logarithms of their sizes, for networks that differ by orders of magnitude."""
    parts: Parts = ()
    """Parts of the symmetry that the net respects by construction, always with permutation; all where left out."""
    varied: Annotated[Varied, arg(name="")] = Varied()


@dataclass(frozen=True, kw_only=True)
@with_settings(PredictorConfig, f"width depth dropout kind render linear statistics {TRAINING}")
class LearnPredictor(LearnNet):
    """Train a net that reads networks to predict a column of a store: a number such as an accuracy, or a class.

    Networks are split by run, or as a column "split" of the store says. Several stores, of several architectures, too,
    are learned from together. The net is compared with boosted trees on plain
    statistics of the layers. An interrupted training continues with --resume.
    """

    target: Annotated[str, arg(metavar="COLUMN")]
    """The column that is predicted; `regauge zoo info STORE` lists the columns of a store."""
    inputs: Annotated[str, arg(metavar="GRID|DATA", help=INPUTS_HELP)] = ""
    probes: Annotated[str, arg(metavar="N|NxN")] = "0"
    """Run the networks on this number of learned inputs, which begin as some of the inputs, and read the outputs. 16x16
    lie on a sheet, which begins as a grid or as the inputs in their order, and are read by convolutions. With --depth,
    weights are read too, and the mean is weighed such that it is no worse in validation than the probes alone."""


@dataclass(frozen=True, kw_only=True)
@with_settings(AutoencoderConfig, f"width depth dropout latent examples {TRAINING}")
class LearnAutoencoder(LearnNet):
    """Train a net that reads networks and gives a vector for each orbit, and one that makes networks from vectors.

    Decoded networks are trained to compute what the encoded ones do at the inputs. Networks are split by run, or as a
    column "split" of the store says. An interrupted training continues with --resume.
    """

    inputs: Annotated[str, arg(metavar="GRID|POINTS|DATA", help=COMPARED_HELP)] = ""
    decoder: Literal["mlp", "template"] = "mlp"
    """Decoder from vectors to networks: an MLP to all parameters; or a learned network whose units hear from each other
    and from the vector how to change."""
    decoder_widths: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Hidden layers of the decoder mlp; 256 and 512 where left out."""
    loss: Literal["squared-error", "distillation"] = "squared-error"
    """Comparison of outputs: by their squared difference, or, for logits of classifiers, by the divergence of
    softened probabilities."""
    temperature: float = 1.0
    """Divisor of logits in --loss distillation."""
    color: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Color the map of the latent vectors on the report by this column."""


@dataclass(frozen=True, kw_only=True)
@with_settings(MatchingConfig, f"width depth vectors probes supervised line line_by distance checked {TRAINING}")
class LearnMatching(LearnRun):
    """Train a net that finds which units of two networks belong together: a method for `align` and `merge`.

    With DATA it learns to align networks such that the loss is low halfway and everywhere else between them, and is
    validated by that. An interrupted training continues with --resume.
    """

    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of stores of one architecture, of any numbers of units."),
    ]
    output: Output
    """File of the matcher, which ends in .safetensors, for --matcher."""
    data: Annotated[str, arg(metavar="DATA", help=f"Data to run the networks on: {BATCHES_HELP}None by default.")] = ""
    loss: Loss = "cross-entropy"
    examples: int = 128
    """Examples of a step, for data from a file."""
    layer: Annotated[str, arg(metavar="LAYER", help=LAYER_HELP)] = "propagation"
    pair_by: Annotated[str, arg(metavar="COLUMN")] = ""
    """Align networks with the same value of this column only, such as those that were fitted to one signal."""


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
    """Networks that read networks: train a predictor, an autoencoder or a matcher, and use it."""

    command: LearnCommand
