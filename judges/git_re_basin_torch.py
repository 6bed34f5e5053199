"""git-re-basin-pytorch's specifications and matching on regauge.

    PEERS=FOLDER .venv/bin/python judges/git_re_basin_torch.py [PIECE-OF-A-NAME ...]

A case passes if

- spec: each permutation of a hand-written specification is a group of regauge that reorders exactly its axes, on the
  model that a script of the peer matches by it; statistics may be left out of it;
- matching: for networks of its models with random values `rg.align` by its specification reaches at least the inner
  product that its `weight_matching` reaches, but for 1 in 1,000; of a permuted copy it finds the permutation. Both end
  in local optima: of three climbs each (three orders of its steps, three starts of regauge) the best counts.

Its one test calls `weight_matching` with an argument that it does not take, and its script for a CNN imports a
specification that is commented out: they are no cases.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judge import Case, Peer, judge
from specifications import Specification, build, compare_axes, judged, random_params
from torch import nn

import regauge as rg

PEER = Peer(
    "git-re-basin-pytorch",
    "https://github.com/themrzmaster/git-re-basin-pytorch",
    "5965f4e5697f3b10dc3ed576af36dc08477b2dc6",
    (),
    ("scipy", "numpy"),
)
EXPLAINED = {
    "spec: vgg16": (
        "the specification also reorders the rows of the classifier, P_Dense_0, which are the classes of its outputs"
    ),
}
"""Sentences for cases that do not pass."""
CLIMBS = 3
"""Climbs of each; those of the peer differ by more than 1 in 1,000."""
MNIST, CIFAR = (2, 1, 28, 28), (2, 3, 32, 32)


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    sys.path.insert(0, str(checkout))
    matching = importlib.import_module("utils.weight_matching")
    nets = {name: importlib.import_module(f"models.{name}") for name in ("mlp", "resnet", "vgg")}
    resnet, mlp = nets["resnet"].ResNet, partial(matching.mlp_permutation_spec, 4)
    models: list[tuple[str, Callable[[], Any], Callable[[], nn.Module], tuple[int, ...]]] = [
        ("mlp, mnist", mlp, nets["mlp"].MLP, MNIST),
        ("mlp, cifar10", mlp, partial(nets["mlp"].MLP, 32 * 32 * 3), CIFAR),
        *((f"resnet22, width {width}", matching.resnet20_permutation_spec, partial(resnet, 22, width, 0, 10), CIFAR)
          for width in (2, 4, 8, 16, 32)),
        *((f"resnet50, width {width}", matching.resnet50_permutation_spec, partial(resnet, 52, width, 0, 10), CIFAR)
          for width in (2, 4, 8)),
        ("vgg16", matching.vgg16_permutation_spec, partial(nets["vgg"].VGG, "VGG16"), CIFAR),
    ]  # fmt: skip
    for name, spec, make, shape in models:
        yield Case(f"spec: {name}", partial(compare_spec, spec, make, shape))
    for name, spec, make, _ in models:
        if name in ("mlp, mnist", "resnet22, width 2", "resnet22, width 4", "resnet50, width 2", "vgg16"):
            for kind in ("two networks", "a permuted copy"):
                yield Case(f"matching: {name}, {kind}", partial(compare_two, matching, spec, make, kind))


def compare_spec(spec: Callable[[], Any], make: Callable[[], nn.Module], shape: tuple[int, ...]) -> str | None:
    """Compare the permutations of a specification with the groups that regauge finds."""
    model, own = build(make, 0), _axes(spec())
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return compare_axes(model, inputs, own, lambda name: name not in own.names and name not in _parameters(model))


def compare_two(matching: Any, make_spec: Callable[[], Any], make: Callable[[], nn.Module], kind: str) -> str | None:
    """Match two networks by both, and compare the inner products of what they reach."""
    whole = make_spec()
    spec = _axes(whole)
    params_a, params_b = ({n: t for n, t in random_params(make, seed).items() if n in spec.names} for seed in (0, 1))
    if kind == "a permuted copy":
        params_b = spec.permuted(params_a, spec.orders(params_a, 2))
    theirs = []
    for seed in range(CLIMBS):
        torch.manual_seed(seed)
        perms = matching.weight_matching(whole, params_a, params_b)
        theirs.append(spec.inner([params_a, spec.permuted(params_b, perms)]))
    method, generator = rg.WeightMatching(restarts=CLIMBS - 1), torch.Generator().manual_seed(0)
    aligned = rg.align(params_a, params_b, spec.symmetry(params_a), method=method, generator=generator)
    ours = spec.inner([params_a, aligned.params])
    best = spec.inner([params_a, params_a]) if kind == "a permuted copy" else None
    return judged(spec.inner([params_a, params_b]), max(theirs), ours, best)


def _parameters(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _axes(spec: Any) -> Specification:
    return Specification({perm: tuple(axes) for perm, axes in spec.perm_to_axes.items()})


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
