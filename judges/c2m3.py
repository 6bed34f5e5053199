"""C2M3's specifications and its synchronized matching on regauge.

    PEERS=FOLDER .venv/bin/python judges/c2m3.py [PIECE-OF-A-NAME ...]

A case passes if

- spec: each permutation of a hand-written specification is a group of regauge that reorders exactly its axes, on the
  model that the peer configures for it; regauge may have groups that the specification leaves out;
- matching: for networks of its models with random values, `rg.align_many` (and `rg.align` for two) by its specification
  reaches at least the sum of inner products of all pairs that its Frank-Wolfe or Git Re-Basin matching reaches, but for
  1 in 1,000; of permuted copies of one network it finds the permutations. Maps of pairs are consistent over cycles.

Its tests are of training, configuration and storage, with no network that is matched: they are no cases.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from judge import Case, Peer, absent, judge
from specifications import Specification, build, compare_axes, judged, random_params
from torch import nn

import regauge as rg

PEER = Peer(
    "cycle-consistent-model-merging",
    "https://github.com/crisostomi/cycle-consistent-model-merging",
    "ea1eca76b19c5d57ed97b1ef396368189e864eee",
    ("einops==0.8.2", "backports.strenum==1.2.8"),
    ("tqdm", "scipy", "matplotlib", "graphviz"),
)
ABSENT = (
    "pytorch_lightning", "pytorch_lightning.callbacks", "torchviz", "omegaconf", "hydra", "hydra.utils", "wandb",
    "torchvision", "torchvision.models", "timm", "nn_core", "nn_core.common", "nn_core.serialization",
    "nn_core.console_logging", "nn_core.common.utils", "nn_core.model_logging", "nn_core.nn_types", "torchmetrics",
    "datasets", "scipy.misc",
)  # fmt: skip
"""Modules that its code imports for training and records, and for graphs of autograd that are not judged here."""
EXPLAINED = {
    "spec: vit": (
        "the hand-written specification of the ViT permutes the rows of its first shortcuts, whose columns read the "
        "stream; the peer configures the automatic specification for this model"
    )
}
"""Sentences for cases that do not pass."""
CIFAR, MNIST = (2, 3, 32, 32), (2, 1, 28, 28)


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]  # it asks for a GPU by name
    bare = ModuleType("ccmm")  # Its own beginning configures training.
    bare.__path__ = [str(checkout / "src" / "ccmm")]
    sys.modules["ccmm"] = bare
    with absent(ABSENT, _stand_in):
        specs = importlib.import_module("ccmm.matching.permutation_spec")
        nets = {name: importlib.import_module(f"ccmm.models.{name}") for name in ("mlp", "cnn", "resnet", "vgg", "vit")}
        sync = importlib.import_module("ccmm.matching.frank_wolfe_sync_matching")
        pairs = importlib.import_module("ccmm.matching.weight_matching")
    resnet = nets["resnet"].ResNet
    models: list[tuple[str, Callable[[], Any], Callable[[], nn.Module], tuple[int, ...]]] = [
        ("mlp", specs.MLPPermutationSpecBuilder(4).create_permutation_spec, nets["mlp"].MLP, MNIST),
        ("mlp, width 32", specs.MLPPermutationSpecBuilder(4).create_permutation_spec,
         partial(nets["mlp"].MLP, hidden_dim=32), MNIST),
        ("cnn", specs.CNNPermutationSpecBuilder().create_permutation_spec,
         partial(nets["cnn"].CNN, 10, 64, (1, 1, 28, 28)), MNIST),
    ]  # fmt: skip
    for norm in ("ln", "bn"):
        for width in (1, 2, 4, 8, 16):
            models.append((f"resnet20, {norm}, width {width}",
                           specs.ResNet20PermutationSpecBuilder(norm).create_permutation_spec,
                           partial(resnet, 22, width, 10, norm), CIFAR))  # fmt: skip
    models.append(("resnet20, 100 classes", specs.ResNet20PermutationSpecBuilder("ln").create_permutation_spec,
                   partial(resnet, 22, 4, 100), CIFAR))  # fmt: skip
    for classes in (10, 100):
        models.append((f"vgg16, {classes} classes", specs.VGG16PermutationSpecBuilder().create_permutation,
                       partial(nets["vgg"].VGG, "VGG16", classes), CIFAR))  # fmt: skip
    vit = partial(nets["vit"].ViT, image_size=32, patch_size=4, num_classes=10, dim=48, depth=6, heads=1, dim_head=24,
                  mlp_dim=64)  # fmt: skip
    models.append(("vit", specs.ViTPermutationSpecBuilder(6).create_permutation_spec, vit, CIFAR))
    for name, spec, make, shape in models:
        yield Case(f"spec: {name}", partial(compare_spec, spec, make, shape))
    small = {"mlp, width 32", "resnet20, ln, width 1"}  # Its matrices of the CNN have 18,432 rows.
    for name, spec, make, _ in models:
        if name in small:
            yield Case(f"matching: {name}, two networks", partial(compare_two, pairs, spec, make))
            for kind in ("three networks", "three permuted copies"):
                yield Case(f"matching: {name}, {kind}", partial(compare_many, sync, spec, make, kind))


def compare_spec(spec: Callable[[], Any], make: Callable[[], nn.Module], shape: tuple[int, ...]) -> str | None:
    """Compare the permutations of a specification with the groups that regauge finds."""
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return compare_axes(build(make, 0), inputs, _axes(spec()))


def compare_two(pairs: Any, make_spec: Callable[[], Any], make: Callable[[], nn.Module]) -> str | None:
    """Match two networks by both, and compare the inner products of what they reach."""
    whole = make_spec()
    spec = _axes(whole)
    params_a, params_b = (random_params(make, seed) for seed in (0, 1))
    torch.manual_seed(0)
    theirs = spec.inner([params_a, spec.permuted(params_b, pairs.weight_matching(whole, params_a, params_b))])
    generator = torch.Generator().manual_seed(0)
    ours = rg.align(params_a, params_b, spec.symmetry(params_a), generator=generator).params
    return judged(spec.inner([params_a, params_b]), theirs, spec.inner([params_a, ours]), None)


def compare_many(sync: Any, make_spec: Callable[[], Any], make: Callable[[], nn.Module], kind: str) -> str | None:
    """Match three networks at once by both, and compare the sum over all pairs."""
    whole = make_spec()
    spec = _axes(whole)
    networks = {name: random_params(make, seed) for seed, name in enumerate("abc")}
    best = None
    if kind == "three permuted copies":
        best = spec.inner([networks["a"]] * 3)
        for seed, name in enumerate("bc"):
            networks[name] = spec.permuted(networks["a"], spec.orders(networks["a"], seed))
    perms, _ = sync.frank_wolfe_synchronized_matching(
        networks, whole, list(networks), sorted(permutations(networks, 2)), 15, "identity", device="cpu"
    )
    # Its permutations lead from the universe to a network: the inverse brings the network there.
    moved = [
        spec.permuted(one, {p: order.argsort() for p, order in perms[name].items()}) for name, one in networks.items()
    ]
    theirs = spec.inner(moved)
    generator = torch.Generator().manual_seed(0)
    many = rg.align_many(list(networks.values()), spec.symmetry(networks["a"]), generator=generator)
    return judged(spec.inner(list(networks.values())), theirs, spec.inner(list(many.params)), best)


def _axes(spec: Any) -> Specification:
    return Specification({perm: tuple(axes) for perm, axes in spec.perm_to_layers_and_axes.items()})


def _stand_in(name: str) -> Any:
    """A class for the name of one, from which the peer derives its own."""
    return type(name, (), {}) if name[0].isupper() and not name.isupper() else MagicMock()


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
