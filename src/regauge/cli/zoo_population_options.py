"""Options of the commands that compare the networks of a store. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from regauge.cli.options import BATCHES_HELP, Json, Loss, Picture, Seed
from regauge.cli.store_options import KeptCheckpoints, NewStore, StoreFolder, Where

COMPARE_DATA_HELP = (
    f"{BATCHES_HELP}Or the name of a data set, such as breast-cancer or mnist, whose examples outside the training "
    "set are used."
)


@dataclass(frozen=True)
class ZooNearest:
    """Find the networks of a store that are nearest to a given network, even if their units have another order.

    The command compares fingerprints of all checkpoints of all runs. The fingerprints of a store are computed only once
    (page "comparison" of the documentation).
    """

    store: StoreFolder
    network: Positional[Path]
    """A checkpoint whose tensors have the same names and shapes as the networks of the store."""
    count: int = 10
    """Number of networks that are printed."""
    json: Json = False


@dataclass(frozen=True)
class ZooAlign:
    """Align a store's networks to one network, and write a new store; the same command continues an interrupted run.

    All checkpoints of all runs are aligned. The folder of the new store also contains the network to which all networks
    were aligned.
    """

    store: StoreFolder
    output: NewStore
    to: Annotated[str, arg(metavar="ID|medoid|universe")] = "medoid"
    """The network to which all networks are aligned: the last checkpoint of the run with this id; the medoid (the
    network nearest to all others); or the universe (the mean of networks that were aligned with one another)."""
    sample: int = 64
    """Number of networks from which the medoid or the universe is computed."""
    on: Annotated[str, arg(help="Where the shards are aligned, as for `regauge zoo train`.")] = "here"
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Settings for the commands that compare networks of a store: which networks, and the path of the picture."""

    store: StoreFolder
    output: Picture
    """The picture (.svg, .png or .pdf). The table is written to a .csv file of the same name."""
    networks: int = 100
    """Number of networks, chosen at random from those that --where and --checkpoints select."""
    where: Where = ()
    checkpoints: KeptCheckpoints = "last"
    overwrite: bool = False
    """Replace the output and its table if they exist."""
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class ZooCompare(Sampled):
    """Measure the barriers between all pairs of networks before and after alignment; write a heat map and a table."""

    data: Annotated[str, arg(metavar="DATA", help=COMPARE_DATA_HELP)]
    align: Literal["pairs", "medoid", "universe", "no"] = "pairs"
    """pairs: each pair is aligned separately. medoid, universe: all networks are aligned to their medoid, or to the
    mean of their universe. no: no alignment, for a store that is already aligned."""
    points: int = 3
    """Number of networks that are evaluated on each line, including both ends; with three only the midpoint."""
    loss: Loss = "cross-entropy"
    """The loss whose barrier is measured."""
    batch: int = 512
    """Examples per batch, for data from a file or a set."""
    on: Annotated[str, arg(help="Where pairs are compared, as for `regauge zoo train`.")] = "here"


@dataclass(frozen=True, kw_only=True)
class ZooMap(Sampled):
    """Draw networks as points in the plane, with similar networks close together; optionally find clusters."""

    by: Literal["orbits", "universe", "weights", "latent"] = "orbits"
    """Distances between networks. orbits: after aligning every pair. universe: after aligning all networks to their
    mean, for many networks. weights: without alignment. latent: between the latent vectors of --autoencoder."""
    autoencoder: Path | None = None
    """File that `regauge learn autoencoder` wrote, for --by latent."""
    clusters: int = 1
    """Number of clusters into which the networks are divided (average linkage)."""
    color: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Color the networks by this column, for example validation_loss, instead of by their clusters."""
    on: Annotated[str, arg(help="Where the pairs of --by orbits are aligned, as for `regauge zoo train`.")] = "here"
