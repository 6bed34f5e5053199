"""The loss of pruned networks by criterion and share, without further training, as a Markdown table.

    REGAUGE_DATA=FOLDER .venv/bin/python benchmarks/pruning.py [mlp|cnn|vit ...] [--torch-pruning FOLDER] > pruning.md

Networks are trained on 6,000 digits of MNIST, pruned with 512 of these digits, and evaluated on 2,000 test digits, each
with three seeds. After every cut, the statistics of batch normalization are recomputed from the 512 digits.
`--torch-pruning` gives a folder that `pip install --target FOLDER --no-deps torch-pruning` filled, whose magnitude
pruner cuts the same networks.
"""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.data.images import mnist
from regauge.nets.transformer import ViT, initialize_transformer

SHARES = (0.1, 0.3, 0.5)
SEEDS = 3
CRITERIA: dict[str, rg.pruning.Criterion] = {
    "random": rg.pruning.RandomUnits(),
    "magnitude": rg.pruning.Magnitude(),
    "Taylor": rg.pruning.Taylor(),
    "output, not fitted": rg.pruning.OutputError(is_compensated=False),
    "output": rg.pruning.OutputError(),
}


def mlp() -> nn.Module:
    """Return an MLP 784-256-128-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def cnn() -> nn.Module:
    """Return a network of three convolutions with batch normalization, a flatten, and two linear layers."""
    layers: list[nn.Module] = []
    for inner, outer in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 10))


def vit() -> nn.Module:
    """Return a vision transformer of two blocks of width 64 with four heads, on 16 patches."""
    module = ViT()
    module.load_state_dict(initialize_transformer(module, torch.Generator().manual_seed(torch.initial_seed())))
    return module


NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "vit": vit}


def main(words: list[str]) -> None:
    folder = words[words.index("--torch-pruning") + 1] if "--torch-pruning" in words else None
    names = [word for word in words if word in NETWORKS] or list(NETWORKS)
    data = mnist()
    train = (data.train_images[:6000], data.train_labels[:6000])
    test = list(zip(data.test_images[:2000].split(500), data.test_labels[:2000].split(500), strict=True))
    print("| network | criterion |" + "".join(f" {share:.0%} |" for share in SHARES))
    print("| --- | --- |" + " --- |" * len(SHARES), flush=True)
    for name in names:
        rows: dict[str, list[list[dict[str, float]]]] = {}
        whole = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            module = fit(NETWORKS[name](), *train, seed)
            whole.append(rg.Task(module, test).evaluate(module.state_dict()))
            for label, found in cut(module, train, test, folder, seed, is_cnn=name == "cnn").items():
                rows.setdefault(label, []).append(found)
        print(f"| {name} | as trained |" + f" {told(whole)} |" * len(SHARES))
        for label, found in rows.items():
            print(f"| {name} | {label} |" + "".join(f" {told(list(cells))} |" for cells in zip(*found, strict=True)))
        sys.stdout.flush()


def fit(module: nn.Module, inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """Train a network with Adam for four epochs."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    for epoch in range(4):
        for order in torch.randperm(len(inputs), generator=generator).split(100):
            optimizer.param_groups[0]["lr"] = 2e-3 * (1 + math.cos(math.pi * epoch / 4)) / 2
            optimizer.zero_grad()
            functional.cross_entropy(module.train()(inputs[order]), labels[order]).backward()
            optimizer.step()
    return module.eval()


def cut(
    module: nn.Module, train: tuple[Tensor, Tensor], test: Any, folder: str | None, seed: int, *, is_cnn: bool
) -> dict[str, list[dict[str, float]]]:
    """Return losses and accuracies of the pruned networks, for each criterion and share."""
    batches = list(zip(train[0][:512].split(64), train[1][:512].split(64), strict=True))
    symmetry = rg.discover(module, (batches[0][0],))
    result: dict[str, list[dict[str, float]]] = {}
    for label, criterion in CRITERIA.items():
        for share in SHARES:
            generator = torch.Generator().manual_seed(seed)
            task = rg.Task(module, batches)
            found = rg.prune(
                module.state_dict(), symmetry, share=share, criterion=criterion, task=task, generator=generator
            )
            assert found.certificate is not None
            assert found.certificate.ok
            assert found.module is not None
            result.setdefault(label, []).append(judge(found.module, batches, test))
    for share in SHARES if folder is not None and is_cnn else ():
        result.setdefault("Torch-Pruning, magnitude", []).append(
            judge(by_torch_pruning(module, folder, batches[0][0], share), batches, test)
        )
    return result


def judge(module: nn.Module, batches: Any, test: Any) -> dict[str, float]:
    """Return loss and accuracy on test data, with statistics of batch normalization from the batches."""
    params = rg.connect.reset_batchnorm(module.state_dict(), module, batches)
    return rg.Task(module, test).evaluate(params)


def by_torch_pruning(module: nn.Module, folder: str | None, inputs: Tensor, share: float) -> nn.Module:
    """Prune the same share of each layer with the magnitude pruner of Torch-Pruning."""
    sys.path.append(str(folder))
    import torch_pruning

    copied = copy.deepcopy(module)
    pruner = torch_pruning.pruner.MagnitudePruner(
        copied,
        inputs[:1],
        importance=torch_pruning.importance.MagnitudeImportance(p=2),
        pruning_ratio=share,
        ignored_layers=[copied[-1]],  # type: ignore[index]
    )
    pruner.step()
    return copied.eval()


def told(found: list[dict[str, float]]) -> str:
    """Return the mean loss and the mean accuracy as text."""
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    return f"{mean['loss']:.3f} ({mean['accuracy']:.1%})"


if __name__ == "__main__":
    main(sys.argv[1:])
