"""From a downloaded zoo to the table that its papers print, in one command: import, published split, training, scores.

    python benchmarks/published_zoos.py nfn siren_mnist_wts                        # Zhou et al. (2023), images
    python benchmarks/published_zoos.py dwsnets mnist-inrs                         # Navon et al. (2023), images
    python benchmarks/published_zoos.py small-cnn-zoo cifar10 --activation relu    # Unterthiner et al. (2020), CNNs

The first line says whose networks these are, how many, and who divided them. No table of this project has numbers from
these downloads yet; the test runs the script on files that it makes in each layout.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge import learn
from regauge import weightspace as ws
from regauge.core.escaping import markdown_table
from regauge.storage import Store
from regauge.zoo import FORMATS, import_zoo


@dataclass(frozen=True)
class Zoo:
    """A published zoo.

    Attributes:
        whose: Who trained and published the networks.
        target: The column that is predicted.
        split: Who divided the networks.
        settings: Settings of the predictor.
    """

    whose: str
    target: str
    split: str
    settings: dict[str, Any]


SIRENS = {
    "kind": "classes",
    "layer": ws.Propagation(channels=1, expansion=1),
    "width": 128,
    "depth": 1,
    "dropout": 0.2,
    "lr": 2e-3,
}
CNNS = {"kind": "fractions", "values": ws.Logarithms(), "reads_moments": True, "width": 16, "depth": 2}
ZOOS = {
    "nfn": Zoo("Zhou et al. (2023), NFN", "label", "as published: by number, at 45,000 and 50,000", SIRENS),
    "dwsnets": Zoo("Navon et al. (2023), DWSNets", "label", "test networks as published, validation ours", SIRENS),
    "small-cnn-zoo": Zoo("Unterthiner et al. (2020), Small CNN Zoo", "test_accuracy", "ours, by run", CNNS),
}


def measure(name: str, path: Path, folder: Path, *, seconds: float, **options: Any) -> str:
    """Import a zoo into a folder, train a predictor, and return the table with its first line."""
    zoo = ZOOS[name]
    import_zoo(FORMATS[name](path, **options), folder)
    store = Store.open(folder)
    config = learn.PredictorConfig(**{**zoo.settings, "epochs": 100_000, "seconds": seconds, "is_cpu_time": True})
    # As in the papers, only the last checkpoint of each run is used.
    made = learn.fit_predictor(store, zoo.target, config=config, checkpoints="last")
    counts = ", ".join(f"{count} for {part}" for part, count in made.about["networks"].items())
    head = f"Networks of {zoo.whose}: {len(store)} in {path.name} ({counts}). Split: {zoo.split}."
    scores = made.about["scores"]
    columns = list(next(iter(scores.values())))
    rows = [[kind, *(f"{one[column]:.4f}" for column in columns)] for kind, one in scores.items()]
    return "\n".join([head, "", *markdown_table(["", *columns], rows, is_numeric=True)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("zoo", choices=list(ZOOS))
    parser.add_argument("path", type=Path)
    parser.add_argument("--activation", help="of the networks to take from the small CNN zoo")
    parser.add_argument("--seconds", type=float, default=900.0, help="CPU seconds of the training")
    options = parser.parse_args()
    chosen = {} if options.activation is None else {"activation": options.activation}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        print(measure(options.zoo, options.path, place, seconds=options.seconds, **chosen))


if __name__ == "__main__":
    main()
