"""The symmetry of a transformer as threads through its layers. Usage: python threads.py FOLDER [--quick]."""

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

import regauge as rg

folder = Path(sys.argv[1])
layers = 1 if "--quick" in sys.argv else 2
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", norm_first=True)
model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
parts = {"embed": nn.Linear(8, 32), "encoder": model, "head": nn.Linear(32, 10)}
symmetry = rg.discover(nn.Sequential(OrderedDict(parts)), torch.randn(2, 5, 8))
symmetry.plot().savefig(folder / "threads.png", dpi=150)
