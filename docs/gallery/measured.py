"""Pictures of the papers' experiments, drawn from the records of every number in docs/records."""

import sys
from pathlib import Path

from regauge.report.figures import picture_figure
from regauge_papers.reproduce import read_run

PICTURES = {
    "cnn-lines": ("002-cnn-lines-cpu", "relu"),
    "decoded-digits": ("002-digits-cpu", "decoded"),
    "flow-averages": ("000-mnist-cpu", "averages"),
    "flow-barriers": ("000-barriers-cpu", "pairs"),
    "flow-digits": ("000-signals-cpu", "digits-one"),
    "flow-gaussians": ("000-gaussians-cpu", "means"),
    "flow-starts": ("000-guidance-cpu", "starts"),
    "flow-steps": ("000-mnist-cpu", "steps"),
    "flow-steps-cancer": ("000-uci-cpu", "steps"),
    "flow-strengths": ("000-folds-cpu", "strengths"),
    "halves": ("001-learned-halves-cpu", "accuracy"),
    "planes": ("004-figure6-cpu", "means"),
    "planes-mlp": ("004-figure2-cpu", "means"),
    "readers-cnns": ("weightspace-cnns-cpu", "scatter"),
    "readers-inrs": ("weightspace-mnist-cpu", "worth"),
    "readers-vits": ("weightspace-vits-cpu", "scatter"),
    "starts": ("001-learned-start-cpu", "starts"),
    "training": ("001-learned-mnist-cpu", "training"),
}

folder, records = Path(sys.argv[1]), Path(__file__).parents[1] / "records"
for name, (record, picture) in PICTURES.items():
    _, _, table = read_run(records / f"{record}.json")
    picture_figure(table.pictures[picture]).savefig(folder / f"{name}.png", dpi=110)
