"""Barriers between vision transformers by width, depth, heads and training, drawn from records of 45 pairs."""

import json
import sys
from pathlib import Path

from regauge.report.figures import picture_figure
from regauge_papers.table import Table

record = Path(__file__).parents[1] / "records" / "transformers-causes-vit-cpu.json"
charts = Table.from_json(json.loads(record.read_text(encoding="utf-8"))).pictures["axes"]
picture_figure(charts).savefig(Path(sys.argv[1]) / "causes.png", dpi=110, facecolor="white")
