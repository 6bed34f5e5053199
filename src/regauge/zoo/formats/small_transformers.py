"""The format of the Small Transformer Zoo: one folder of networks, and a table with their settings.

The files of the networks are `{set}/{run}_{epoch}_{hits}.pt`, where `hits` is the test accuracy in units of 1/10,000.
The table `metadata/{set}.csv` lists checkpoints with the settings of their runs. `{set}` is "mnist" or "ag_news".
Networks for images contain the embedding of patches and fixed position codes. Networks for texts contain no embedding
and no position codes. The inputs of networks for texts are word vectors, which all networks share and which are not
part of the zoo. Each run also has a checkpoint with its best test accuracy. The file name of the best checkpoint has no
epoch, and the best checkpoint is not imported.
"""

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regauge.checkpoints.claims import Claims
from regauge.core.params import Params
from regauge.storage.architecture import Architecture
from regauge.zoo.formats.matrix_zoos import read_table
from regauge.zoo.formats.modules import examples
from regauge.zoo.formats.zoo_source import Source, Tree, naming

NETWORK = re.compile(r"(?:(?P<place>.*)/)?(?P<set>[^/]+)/(?P<run>[^/_]+)_(?P<epoch>\d{1,9})_(?P<hits>\d{1,5})\.pt")
BLOCK = re.compile(r"encoder\.(\d{1,9})\.")
HITS = 10_000
"""The factor between the test accuracy and the number in a file name."""
JUDGED = "75"
"""The training epoch of the networks that the paper uses for its experiments."""
SEED, SHARES = 3, (("train", 0.7), ("validation", 0.15))
"""The default seed of the paper's program, and the shares of its splits. All further networks are for testing."""
HEADS = 2
"""The attention heads of the published networks, if the table does not give the number."""
CHECKPOINT_COLUMNS = ("ckpt_epoch", "ckpt_file", "test_top1_accuracy", "test_accuracy")
"""Columns of the table that describe a checkpoint, not its run."""
TOKENS = 8
"""The number of tokens in example inputs of networks for texts."""


def read_small_transformer_zoo(path: str | Path) -> Source:
    """Return the networks of MNIST-Transformers or AGNews-Transformers with settings, test accuracy and split.

    The split is the same as in the paper's program. The program lists the networks of epoch 75 in the order of the
    table, shuffles them with its default seed, and uses the first 70% for training and the next 15% for validation.
    In the imported population, all networks of a run are in the same split. Runs without a network of epoch 75 in the
    table have no split.

    Args:
        path: The unpacked folder that contains `metadata`, or the downloaded zip file.

    Raises:
        FileNotFoundError: The folder contains no networks of this zoo, or no table.
        ValueError: The path contains several sets of networks, or other networks.

    References:
        Tran et al. (2025), Equivariant neural functional networks for transformers, section 6, and their program.
    """
    tree = Tree(path)
    found = {name: fitting for name in tree.names if (fitting := NETWORK.fullmatch(name))}
    if not found:
        raise FileNotFoundError(
            f"{str(tree.path)!r} has no networks SET/RUN_EPOCH_HITS.pt, such as mnist/1a2b3c4d_75_9835.pt; there are "
            f"for example {tree.names[:3]}"
        )
    places = sorted({(fitting["place"] or "", fitting["set"]) for fitting in found.values()})
    if len(places) > 1:
        raise ValueError(
            f"{str(tree.path)!r} has networks in {['/'.join(filter(None, one)) for one in places[:4]]}; give the "
            "folder of one set of networks, or its zip file"
        )
    ((place, kind),) = places
    table = "/".join(filter(None, (place, "metadata", f"{kind}.csv")))
    if table not in tree.names:
        raise FileNotFoundError(f"{str(tree.path)!r} has no {table}; give the folder that contains 'metadata'")
    listed = read_table(tree.read(table), tree.path / table)
    settings = {
        _run(row): {key: value for key, value in row.items() if key not in CHECKPOINT_COLUMNS} for row in listed
    }
    splits = divide([_run(row) for row in listed if str(row.get("ckpt_epoch")) == JUDGED])
    numbers = {run: k for k, run in enumerate(sorted({fitting["run"] for fitting in found.values()}))}
    rows = []
    for name, fitting in found.items():
        run, accuracy = fitting["run"], int(fitting["hits"]) / HITS
        own = {"id": numbers[run], "step": int(fitting["epoch"]), "run": run, "test_accuracy": accuracy, "file": name}
        rows.append(settings.get(run, {}) | splits.get(run, {}) | own)
    rows.sort(key=lambda row: (row["id"], row["step"]))
    with naming(tree.path / table):
        heads = _heads(rows)
    first = tree.checkpoint(rows[0]["file"])[0]
    with naming(tree.path / rows[0]["file"]), Claims(first):
        architecture = _architecture(first, heads, kind)
        image = architecture.settings["image"]
        inputs = examples(TOKENS, architecture.settings["width"]) if image is None else examples(*image[:2], image[1])
    return Source.of_files(tree, architecture, rows, inputs, {"imported": "Small Transformer Zoo"})


def divide(runs: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the split of each run as a column, given the runs of networks of epoch 75 in the order of the table."""
    shuffled = list(runs)
    random.Random(SEED).shuffle(shuffled)
    splits = dict.fromkeys(shuffled, "test")
    start = 0
    for name, share in SHARES:
        end = start + int(len(shuffled) * share)
        splits |= dict.fromkeys(shuffled[start:end], name)
        start = end
    return {run: {"split": name} for run, name in splits.items()}


def _run(row: dict[str, Any]) -> str:
    """Return the run of a row of the table."""
    return str(row.get("ckpt_file", "")).rpartition("/")[2].partition("_")[0]


def _heads(rows: Sequence[dict[str, Any]]) -> int:
    """Return the number of attention heads of all networks."""
    heads = {row["n_attention_heads"] for row in rows if "n_attention_heads" in row} or {HEADS}
    if len(heads) > 1 or not isinstance(min(heads), int):
        raise ValueError(f"the networks have {sorted(map(str, heads))} attention heads, but all must have one number")
    return int(heads.pop())


def _architecture(params: Params, heads: int, kind: str) -> Architecture:
    """Return the architecture of a network, given its tensors."""
    try:
        hidden, width = params["encoder.0.fc1.weight"].shape
        classes, image = params["classifier.fc2.weight"].shape[0], None
        if "embedding.conv1.weight" in params:
            _, channels, patch, _ = params["embedding.conv1.weight"].shape
            image = [channels, patch * math.isqrt(params["embedding.pos_embedding"].shape[0]), patch]
        if not width * math.prod(image or ()):
            raise ValueError("images, patches and tokens must not be empty")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{list(params)[:4]} are not the tensors of a small transformer ({error}); import them as a folder"
        ) from error
    layers = len({fitting[1] for name in params if (fitting := BLOCK.match(name))})
    sizes = {"width": width, "hidden": hidden, "classes": classes, "layers": layers, "heads": heads, "image": image}
    return Architecture(f"small transformer, {kind}", "regauge.zoo.formats.modules:SmallTransformer", sizes)
