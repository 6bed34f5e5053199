"""From a downloaded zoo to the table in its paper, in one command: import, published split, training, and scores.

    python benchmarks/published_zoos.py nfn siren_mnist_wts                        # Zhou et al. (2023), images
    python benchmarks/published_zoos.py dwsnets mnist-inrs                         # Navon et al. (2023), images
    python benchmarks/published_zoos.py small-cnn-zoo cifar10 --activation relu    # Unterthiner et al. (2020), CNNs
    python benchmarks/published_zoos.py small-transformer-zoo MNIST-Transformers.zip    # Tran et al. (2025)
    python benchmarks/published_zoos.py vit-model-zoo vit_cifar100_finetuned --template "**FCMLP_False**"

The first line of the output names the authors of the networks, the number of networks, and the source of the split. The
vision transformers of the last command (Falk et al., 2025) are too large for a net over networks. The accuracies of
these vision transformers are predicted from statistics of layers, with one network in memory at a time. No table of
this project contains numbers from these downloads yet; the test runs the script on files that it makes in each layout.
"""

import argparse
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from regauge import learn
from regauge import weightspace as ws
from regauge.core.escaping import markdown_table
from regauge.learn.layer_statistics import boosted_trees, layer_statistics, ridge_regression
from regauge.learn.predictor import CONSTANT, RIDGE, TREES
from regauge.learn.targets import Target
from regauge.zoo import FORMATS, Source, import_zoo


@dataclass(frozen=True)
class Zoo:
    """A published zoo.

    Attributes:
        whose: The authors who trained and published the networks.
        target: The column that is predicted.
        split: The source of the split of the networks.
        settings: Settings of the predictor.
        where: The values of columns that networks must have. By default, all networks are imported.
    """

    whose: str
    target: str
    split: str
    settings: dict[str, Any]
    where: dict[str, tuple[Any, ...]] = field(default_factory=dict)


SIRENS = {
    "kind": "classes",
    "layer": ws.Propagation(channels=1, expansion=1),
    "width": 128,
    "depth": 1,
    "dropout": 0.2,
    "lr": 2e-3,
}
CNNS = {"kind": "fractions", "values": ws.Logarithms(), "reads_moments": True, "width": 16, "depth": 2}
VITS, BASE = "vit-model-zoo", "pretraining::model"
JUDGED = {"step": (75,), "split": ("train", "validation", "test")}
"""The values of columns that networks must have: as in the paper, only the networks that its program divides are
used."""
ZOOS = {
    "nfn": Zoo("Zhou et al. (2023), NFN", "label", "as published: by number, at 45,000 and 50,000", SIRENS),
    "dwsnets": Zoo("Navon et al. (2023), DWSNets", "label", "test networks as published, validation ours", SIRENS),
    "small-cnn-zoo": Zoo("Unterthiner et al. (2020), Small CNN Zoo", "test_accuracy", "ours, by run", CNNS),
    "small-transformer-zoo": Zoo(
        *("Tran et al. (2025), Small Transformer Zoo", "test_accuracy", "that of the published program, epoch 75"),
        *(CNNS, JUDGED),
    ),
    VITS: Zoo("Falk et al. (2025), ViTModelZoo", "test_acc", "ours, by pretrained network", {}),
}


def measure(name: str, path: Path, folder: Path, *, seconds: float, **options: Any) -> str:
    """Return the table of a zoo with its first line. Networks that a net reads are imported into a folder."""
    zoo, source = ZOOS[name], FORMATS[name](path, **options)
    count, counts, scores = predict_by_statistics(zoo, source) if name == VITS else train(zoo, source, folder, seconds)
    head = f"Networks of {zoo.whose}: {count} in {path.name} ({counts}). Split: {zoo.split}."
    columns = list(next(iter(scores.values())))
    rows = [[kind, *(f"{one[column]:.4f}" for column in columns)] for kind, one in scores.items()]
    return "\n".join([head, "", *markdown_table(["", *columns], rows, is_numeric=True)])


def train(zoo: Zoo, source: Source, folder: Path, seconds: float) -> tuple[int, str, dict[str, Any]]:
    """Train a predictor. Return the number of networks, their division, and the scores of the net and its controls."""
    kept = [k for k, row in enumerate(source.rows) if all(row.get(key) in some for key, some in zoo.where.items())]
    rows = [source.rows[k] for k in kept]
    store = import_zoo(replace(source, rows=rows, read=lambda numbers: source.read([kept[k] for k in numbers])), folder)
    config = learn.PredictorConfig(**{**zoo.settings, "epochs": 100_000, "seconds": seconds, "is_cpu_time": True})
    # As in the papers, only the last checkpoint of each run is used.
    made = learn.fit_predictor(store, zoo.target, config=config, checkpoints="last")
    counts = ", ".join(f"{count} for {part}" for part, count in made.about["networks"].items())
    return len(store), counts, made.about["scores"]


def predict_by_statistics(zoo: Zoo, source: Source) -> tuple[int, str, dict[str, Any]]:
    """Predict the last checkpoint of each run, from runs that were not fine-tuned from the same network."""
    last = {row["id"]: k for k, row in enumerate(source.rows) if zoo.target in row}
    known = [source.rows[k] for k in last.values()]
    values, bases = np.array([row[zoo.target] for row in known]), np.array([row[BASE] for row in known])
    features = np.concatenate([layer_statistics(source.read([k]).params) for k in last.values()])
    target, readers = Target.of(zoo.target, values, values, "fractions"), {RIDGE: ridge_regression}
    readers[TREES] = partial(boosted_trees, seed=0)
    predicted = {kind: np.empty(len(values)) for kind in (*readers, CONSTANT)}
    for base in np.unique(bases):
        test = bases == base
        for kind, fit in readers.items():
            predicted[kind][test] = fit(features[~test], values[~test], target)(features[test])
        predicted[CONSTANT][test] = target.constant(values[~test])
    scores = {kind: target.score(found, values) for kind, found in predicted.items()}
    return len(source.rows), "each pretrained network for test once", scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("zoo", choices=list(ZOOS))
    parser.add_argument("path", type=Path)
    parser.add_argument("--activation", help="of the networks to take from the small CNN zoo")
    parser.add_argument("--seconds", type=float, default=900.0, help="CPU seconds of the training")
    parser.add_argument("--template", help="that the names of vision transformers must match")
    options = parser.parse_args()
    given = {"activation": options.activation, "template": options.template}
    chosen = {name: value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        print(measure(options.zoo, options.path, place, seconds=options.seconds, **chosen))


if __name__ == "__main__":
    main()
