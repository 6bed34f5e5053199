"""Eight networks, each moved at random: how far each two are from one another, before and modulo their symmetry."""

import sys
from pathlib import Path

import numpy as np
import torch

import regauge as rg
from regauge.data import digits
from regauge.nets import ClassifierConfig, initialize, mlp, train
from regauge.report import matrices_figure

folder, is_quick = Path(sys.argv[1]), "--quick" in sys.argv
data, model, count = digits(), mlp(64, 64, 10), 3 if is_quick else 8
config = ClassifierConfig(epochs=1 if is_quick else 20, batch=128)
networks = []
for seed in range(count):
    generator = torch.Generator().manual_seed(seed // 2)  # two and two begin alike, and see the images in other orders
    start = initialize(model, generator)
    order = torch.Generator().manual_seed(seed)
    networks.append(train(model, start, data.train_images, data.train_labels, config, generator=order))

symmetry = rg.discover(model, (data.test_images[:4],))
moved = [symmetry.act(symmetry.random(torch.Generator().manual_seed(seed)), one) for seed, one in enumerate(networks)]


def distance(a: rg.Params, b: rg.Params) -> float:
    return sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5


def matrix(between) -> np.ndarray:
    return np.array([[between(a, b) if a is not b else 0.0 for b in moved] for a in moved])


shown = {"as they are": distance, "modulo the symmetry": lambda a, b: rg.canonical.orbit_distance(a, b, symmetry)}
matrices_figure({title: matrix(one) for title, one in shown.items()}, "distance").savefig(
    folder / "population.png", dpi=110
)
