"""Two networks that were trained from different seeds: the loss on the line between them, as trained and aligned."""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import regauge as rg

folder = Path(sys.argv[1])
steps = 5 if "--quick" in sys.argv else 300
pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
inputs, targets = pixels.float() / 16, digits.long()


def train(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for rows in torch.randint(1400, (steps, 128)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return model


model, other = train(0), train(1)
a, b = model.state_dict(), other.state_dict()
task = rg.Task(model, [(inputs[1400:], targets[1400:])])
symmetry = rg.discover(model, inputs[:8])
curve = rg.line(a, b, lambda params: {"loss": task.evaluate(params)["loss"]}, symmetry=symmetry)
figure = curve.plot(title="cross entropy (nats)")
figure.savefig(folder / "first.png", dpi=150)
