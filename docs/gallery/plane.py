"""The loss on the plane through three networks, as trained, and once two of them are aligned to the first."""

import sys
from pathlib import Path

import torch

import regauge as rg
from regauge.data import digits
from regauge.nets import ClassifierConfig, initialize, mlp, split_batches, train
from regauge.report.figures import picture_figure
from regauge.report.pictures import Surface

folder, is_quick = Path(sys.argv[1]), "--quick" in sys.argv
data, model = digits(), mlp(64, 128, 128, 10)
task = rg.Task(model, split_batches(data.test_images, data.test_labels))
config = ClassifierConfig(epochs=1 if is_quick else 20, batch=128)
networks = []
for seed in range(3):
    generator = torch.Generator().manual_seed(seed)
    start = initialize(model, generator)
    networks.append(train(model, start, data.train_images, data.train_labels, config, generator=generator))

a, *others = networks
symmetry = rg.discover(model, (data.test_images[:4],))
aligned = [rg.align(a, one, symmetry).params for one in others]
panels = []
for title, (b, c) in {"as trained": others, "B and C aligned to A": aligned}.items():
    found = rg.connect.plane(a, b, c, task, resolution=7 if is_quick else 21)
    xs, ys, losses = found.xs.tolist(), found.ys.tolist(), found.values["loss"].tolist()
    panels.append(Surface(f"loss, {title}", xs, ys, losses, found.points.tolist(), ("A", "B", "C")))
picture_figure(tuple(panels)).savefig(folder / "plane.png", dpi=110)
