"""Options of the commands that compare the networks of a store. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from regauge.cli.options import BATCHES_HELP, Json, Loss, Picture, Seed
from regauge.cli.store_options import KeptCheckpoints, NewStore, StoreFolder, Where

COMPARE_DATA_HELP = (
    f"{BATCHES_HELP}Or a set that populations are trained on, such as breast-cancer or mnist: the examples that are "
    "kept from training."
)


@dataclass(frozen=True)
class ZooNearest:
    """Find the networks of a store that are nearest to a network, in whatever gauge, by their fingerprints.

    All checkpoints of all runs are looked at. The fingerprints of a store are computed once (page "comparison" of
    the documentation).
    """

    store: StoreFolder
    network: Positional[Path]
    """A checkpoint with the tensors of the store's networks."""
    count: int = 10
    """Number of networks that are printed."""
    json: Json = False


@dataclass(frozen=True)
class ZooAlign:
    """Align all networks of a store to one, into another store; the same command continues an interrupted one.

    All checkpoints of all runs are aligned. The network that they are aligned to is written into the folder of the new
    store.
    """

    store: StoreFolder
    output: NewStore
    to: Annotated[str, arg(metavar="ID|medoid|universe")] = "medoid"
    """The trajectory with this id, at its end; the medoid: the network nearest to all others; or the universe: the mean
    of networks that were aligned with one another."""
    sample: int = 64
    """Number of networks among which the medoid is found, or of which the universe is made."""
    on: Annotated[str, arg(help="Where the shards are aligned, as for `regauge zoo train`.")] = "here"
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Some networks of a store, and where a picture of them goes; shared by the commands that compare networks."""

    store: StoreFolder
    output: Picture
    """The picture, .svg, .png or .pdf; the table goes to the same name with .csv."""
    networks: int = 100
    """Number of networks, drawn at random from those that --where and --checkpoints leave."""
    where: Where = ()
    checkpoints: KeptCheckpoints = "last"
    overwrite: bool = False
    """Replace the output and its table if they exist."""
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class ZooCompare(Sampled):
    """Measure the barriers between all pairs of networks, before and after alignment: a heat map and a table."""

    data: Annotated[str, arg(metavar="DATA", help=COMPARE_DATA_HELP)]
    align: Literal["pairs", "medoid", "universe", "no"] = "pairs"
    """The alignment: each pair aligned with one another, or all networks aligned to their medoid or to the mean of
    their universe; or nothing, for a store that is aligned already."""
    points: int = 3
    """Networks on each line, both ends included; three are the midpoint alone."""
    loss: Loss = "cross-entropy"
    """The loss whose barrier is measured."""
    batch: int = 512
    """Examples per batch, for data from a file or a set."""
    on: Annotated[str, arg(help="Where pairs are compared, as for `regauge zoo train`.")] = "here"


@dataclass(frozen=True, kw_only=True)
class ZooMap(Sampled):
    """Draw networks as points in the plane, near one another where their orbits are near; and divide them."""

    by: Literal["orbits", "universe", "weights", "latent"] = "orbits"
    """Distances between networks. orbits: every pair is aligned. universe: all are aligned to the mean of their
    universe, for many networks. weights: as they are. latent: of the latent vectors of --autoencoder."""
    autoencoder: Path | None = None
    """File that `regauge learn autoencoder` wrote, for --by latent."""
    clusters: int = 1
    """Number of clusters into which the networks are divided, by the mean distance between clusters."""
    color: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Color the networks by this column, for example validation_loss, instead of by their clusters."""
    on: Annotated[str, arg(help="Where the pairs of --by orbits are aligned, as for `regauge zoo train`.")] = "here"
