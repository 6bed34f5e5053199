"""Options of the commands that train nets over networks. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.options import BATCHES_HELP, CHECKPOINT_HELP, Json, MaybeOutput, Model, Output, Seed
from regauge.cli.zoo_options import Where

INPUTS_HELP = (
    "Inputs of the networks, for --render and --probes: grid:28x28, the centers of pixels over [-1, 1]^2, for networks "
    f"of coordinates; or {BATCHES_HELP}of which the inputs of the first 512 examples are used."
)
LAYER_HELP = (
    "Kind of the net's layers: propagation, message_passing, nfn, dws, relational_attention, or another of "
    "regauge.weightspace.LAYERS."
)


@dataclass(frozen=True, kw_only=True)
class Varied:
    """How networks are changed at random in each step of the training."""

    augment: Annotated[
        tuple[Literal["permutation", "sign", "scale", "shift", "linear"], ...], arg(metavar="PART ...")
    ] = ()
    """Parts of the symmetry by whose random elements networks are moved, where --parts leaves some out."""
    translate: float = 0.0
    """Shift the inputs of networks of coordinates by up to so much along each axis, which changes their first layer."""
    rotate: float = 0.0
    """Rotate these inputs by up to so many degrees."""
    scale: float = 0.0
    """Multiply these inputs by a factor that differs from 1 by up to so much."""
    noise: float = 0.0
    """Add noise to all weights, as a share of the root mean square of each tensor."""
    drop: float = 0.0
    """Set this share of the weights to zero."""


@dataclass(frozen=True, kw_only=True)
class LearnPredictor:
    """Train a net that reads networks to predict a column of a store: a number such as an accuracy, or a class.

    Networks are split by run, or as a column "split" of the store says. Several stores, of several architectures, too,
    are learned from together. Beside the net stand boosted trees on plain
    statistics of the layers. An interrupted training continues with --resume.
    """

    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of stores, of one or several architectures."),
    ]
    target: Annotated[str, arg(metavar="COLUMN")]
    """What is predicted; `regauge zoo info STORE` lists the columns."""
    output: Output
    """Where the net goes, a .safetensors file; the report goes to the same name with .html, its numbers with .json."""
    kind: Literal["numbers", "fractions", "classes"] | None = None
    """Whether the column has numbers, fractions in [0, 1] such as accuracies, or classes; texts, truth values and whole
    numbers that recur are classes where left out, everything else numbers."""
    layer: Annotated[str, arg(metavar="LAYER", help=LAYER_HELP)] = "propagation"
    layer_settings: Annotated[str, arg(metavar="JSON")] = "{}"
    """Settings of the layers as JSON, for example '{"channels": 8}'."""
    width: int = 64
    """Length of the vectors of units."""
    depth: int | None = None
    """Number of layers, 4 where left out; 0 reads nothing but what networks compute at --probes, with which it is 0."""
    fourier: int = 0
    """Encode values with so many sines and cosines each."""
    logarithms: bool = False
    """Encode values with logarithms of their sizes, for networks that differ by orders of magnitude."""
    moments: bool = False
    """Let the net begin with the moments of every tensor, too: sizes, means and extremes."""
    parts: Annotated[
        tuple[Literal["permutation", "sign", "scale", "shift", "linear"], ...], arg(metavar="PART ...")
    ] = ()
    """What the net respects by construction, always with permutation; the whole symmetry where left out."""
    widening: bool = False
    """Count a unit that is split in two as one, so that function-preserving widening changes no prediction."""
    dropout: float | None = None
    """Share of the hidden units of the head that are dropped in training; 0, or 0.2 with --probes, where left out."""
    inputs: Annotated[str, arg(metavar="GRID|DATA", help=INPUTS_HELP)] = ""
    render: float = 0.0
    """Weight of a second loss in training: the net also predicts what the networks that it reads compute at the inputs,
    which needs no labels."""
    probes: Annotated[str, arg(metavar="N|NxN")] = "0"
    """Run the networks on so many learned inputs, which begin as some of the inputs, and read what they compute; 16x16
    lie on a sheet, which begins as a grid or as the inputs in their order, and are read by convolutions. With --depth,
    weights are read too, and the mean is weighed such that it is no worse in validation than the probes alone."""
    varied: Annotated[Varied, arg(name="")] = Varied()
    epochs: int = 100
    """How often each network is read at most."""
    batch: int = 64
    """Networks of a step."""
    lr: float = 2e-3
    """Largest learning rate."""
    weight_decay: float = 1e-2
    """Weight decay of AdamW."""
    patience: int | None = None
    """End the training after so many epochs without a better validation."""
    seconds: float | None = None
    """End the training after so many seconds; the learning rate falls in time."""
    statistics: Literal["yes", "no"] = "yes"
    """Whether boosted trees on statistics of the layers are fitted, too."""
    split_by: Annotated[str, arg(metavar="COLUMN")] = ""
    """Divide the networks by this column instead of by run: those with one value there are in one part. Networks that
    several runs fitted to one signal are divided by the column "signal" where left out."""
    where: Where = ()
    final: bool = False
    """Only the last checkpoint of each trajectory that was not discarded."""
    device: str = "cpu"
    """Where the net is trained: cpu, cuda or another device of torch."""
    seed: Seed = 0
    resume: bool = False
    """Continue an interrupted training with the same settings."""
    overwrite: bool = False
    """Replace the output and what is written beside it if they exist, and what an interrupted training left."""
    json: Json = False


@dataclass(frozen=True)
class LearnPredict:
    """Tell what a trained predictor says about networks."""

    predictor: Annotated[Positional[Path], arg(help="What `regauge learn predictor` wrote.")]
    networks: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE|CHECKPOINT [...]", help=f"Folders of stores, or checkpoints: {CHECKPOINT_HELP}"),
    ]
    model: Model = None
    """The architecture of the checkpoints, for a net with probes; a store knows its own."""
    output: MaybeOutput = None
    """Write the predictions to this file, .csv, instead of printing them."""
    overwrite: bool = False
    """Replace the output if it exists."""
    json: Json = False


LearnCommand = (
    Annotated[LearnPredictor, subcommand("predictor", prefix_name=False)]
    | Annotated[LearnPredict, subcommand("predict", prefix_name=False)]
)


@dataclass(frozen=True)
class Learn:
    """Networks that read networks: train a predictor, and use it."""

    command: LearnCommand
