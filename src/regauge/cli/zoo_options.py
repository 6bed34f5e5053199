"""Options of the commands on populations. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.options import Json, Output
from regauge.cli.store_options import KeptCheckpoints, NewStore, StoreFolder, Where
from regauge.cli.zoo_population_options import ZooAlign, ZooCompare, ZooMap, ZooNearest

ON_HELP = (
    "Where the networks are trained: in this process (here); in processes of this machine (processes, processes:4); in "
    "a local Dask cluster (dask, dask:4); or on a Dask scheduler (tcp://HOST:PORT). Each worker has one thread."
)
Storage = Annotated[
    Literal["float16", "bfloat16"] | None,
    arg(help="Round the stored weights to this dtype, which halves the size. By default they are not rounded."),
]


@dataclass(frozen=True)
class ZooTrain:
    """Train a population of networks and store it; the same command continues an interrupted training.

    Under torchrun (RANK, WORLD_SIZE) or in a job array of Slurm, each process takes its share of the shards.
    """

    config: Annotated[
        Positional[str],
        arg(
            metavar="CONFIG",
            help="A preset, such as uci-mlps, mnist-tiny-mlps, mnist-mlps, cifar10-mlps, cifar10-cnns, "
            "small-cnns-relu, sine-inrs, mnist-inrs or fashion-inrs; or package.module:factory or file.py:factory that "
            "returns a Config.",
        ),
    ]
    output: NewStore
    networks: int | None = None
    """Number of networks, by default from the config. A smaller store is extended. The store has all checkpoints in the
    config (82 per network of uci-mlps). By default, most commands read only the last checkpoint of each run."""
    seed: int | None = None
    """Seed of all random numbers; by default from the config."""
    on: Annotated[str, arg(help=ON_HELP)] = "here"
    shard: int | None = None
    """Number of networks in a shard, which one worker trains. The default takes some minutes and is at most 512."""
    device: str = "cpu"
    """Device on which the networks are trained: cpu, cuda or another device of torch."""
    storage: Storage = None


@dataclass(frozen=True)
class ZooInfo:
    """Print the contents of a store: networks, columns, symmetry, size in bytes."""

    store: StoreFolder
    json: Json = False


@dataclass(frozen=True)
class ZooImport:
    """Import networks from other programs into a store; networks with NaN or Inf are marked."""

    source: Positional[Path]
    """Folder, zip file or HDF5 file."""
    output: NewStore
    format: Annotated[str, arg(metavar="FORMAT")] = "folder"
    """Layout of the source: folder, dwsnets, nfn, deep-align, small-cnn-zoo, small-transformer-zoo, model-zoo-dataset,
    vit-model-zoo or hdf5, or one that another package adds."""
    template: str | None = None
    """Template of the file names below a folder, by default {id}.pt. For example, {id}/step{step}.pt fills the columns
    id and step; * matches anything in one name, and ** any path. For Ray Tune: a pattern that selects checkpoints."""
    beside: tuple[str, ...] = ()
    """Checkpoint entries that are not parameters, for example label, which become columns of the store."""
    model: Annotated[str | None, arg(metavar="MODEL")] = None
    """package.module:factory of the networks in a folder or HDF5 file, from which their symmetry is found."""
    settings: str = "{}"
    """Arguments of the factory as JSON, for example '{"widths": [784, 10, 10]}'."""
    input_shape: tuple[str, ...] = ()
    """Shapes of the model's inputs, for example 2x784."""
    activation: str | None = None
    """Read only networks with this activation from the small CNN zoo, whose networks have different activations."""
    dataset: str | None = None
    """Name of the data set in an HDF5 file, "dataset" by default."""
    storage: Storage = None


@dataclass(frozen=True)
class ZooExport:
    """Write networks of a store as files that other programs read."""

    store: StoreFolder
    output: Output
    """A new folder for the files."""
    format: Literal["safetensors", "npy", "small-cnn-zoo", "dwsnets"] = "safetensors"
    """safetensors: one file for each network. npy: one array for all networks, and its layout. Others: public zoos."""
    where: Where = ()
    checkpoints: KeptCheckpoints = "last"


@dataclass(frozen=True)
class ZooVerify:
    """Read every byte of a store and compare the checksums; exit code 1 if a shard is damaged."""

    store: StoreFolder


ZooCommand = (
    Annotated[ZooTrain, subcommand("train", prefix_name=False)]
    | Annotated[ZooInfo, subcommand("info", prefix_name=False)]
    | Annotated[ZooImport, subcommand("import", prefix_name=False)]
    | Annotated[ZooExport, subcommand("export", prefix_name=False)]
    | Annotated[ZooVerify, subcommand("verify", prefix_name=False)]
    | Annotated[ZooNearest, subcommand("nearest", prefix_name=False)]
    | Annotated[ZooAlign, subcommand("align", prefix_name=False)]
    | Annotated[ZooCompare, subcommand("compare", prefix_name=False)]
    | Annotated[ZooMap, subcommand("map", prefix_name=False)]
)


@dataclass(frozen=True)
class Zoo:
    """Populations of networks: train, store, import and export them; align, compare and map them."""

    command: ZooCommand
