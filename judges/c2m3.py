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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from judge import Case, Failed, Peer, absent, judge
from torch import Tensor, nn

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
    for name, spec, build, shape in models:
        yield Case(f"spec: {name}", partial(compare_spec, spec, build, shape))
    small = {"mlp, width 32", "resnet20, ln, width 1"}  # Its matrices of the CNN have 18,432 rows.
    for name, spec, build, _ in models:
        if name in small:
            yield Case(f"matching: {name}, two networks", partial(compare_two, pairs, spec, build))
            for kind in ("three networks", "three permuted copies"):
                yield Case(f"matching: {name}, {kind}", partial(compare_many, sync, spec, build, kind))


def compare_spec(spec: Callable[[], Any], build: Callable[[], nn.Module], shape: tuple[int, ...]) -> str | None:
    """Compare the permutations of a specification with the groups that regauge finds."""
    model = _build(build, 0).eval()
    known = model.state_dict()
    wanted = {}
    for perm, axes in spec().perm_to_layers_and_axes.items():
        if absent := [name for name, _ in axes if name not in known]:
            raise Failed(f"the model has no {absent[0]}, which {perm} moves")
        wanted[perm] = frozenset(axes)
    symmetry = rg.discover(model, (torch.randn(shape, generator=torch.Generator().manual_seed(0)),))
    found = {
        frozenset((p.parameter, p.axis) for p in group.placements): group
        for group in symmetry.groups
        if group.has_order
    }
    matrices = [
        frozenset((p.parameter, p.axis) for p in group.placements)
        for group in symmetry.groups
        if group.matrix != "none"
    ]
    notes: dict[str, None] = {}
    for perm, axes in wanted.items():
        if axes in found:
            continue
        if axes in matrices:
            notes["matrices act where the specification has permutations"] = None
            continue
        near = max([*found, *matrices], key=lambda other: len(other & axes), default=frozenset())
        text = f"{perm} moves {_short(axes - near)} and not {_short(near - axes)}, unlike regauge"
        raise Failed(f"{text}; {_effect(model, shape, perm, axes)}")
    if len(found) > len(wanted):
        notes["regauge also has groups that the specification leaves out"] = None
    return "; ".join(notes) or None


def _effect(model: nn.Module, shape: tuple[int, ...], perm: str, axes: Iterable[tuple[str, int]]) -> str:
    """The change of the outputs by a random order of a permutation of the specification, in float64."""
    model = model.double()
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    params = {
        name: t + 0.1 * torch.randn(t.shape, generator=torch.Generator().manual_seed(k), dtype=t.dtype)
        if t.is_floating_point() and "running" not in name
        else t
        for k, (name, t) in enumerate(model.state_dict().items())
    }
    moved = dict(params)
    for name, axis in axes:
        order = torch.randperm(params[name].shape[axis], generator=torch.Generator().manual_seed(2))
        moved[name] = moved[name].index_select(axis, order)
    first, second = (torch.func.functional_call(model, one, (inputs,)) for one in (params, moved))
    change = float((first - second).abs().max() / first.abs().max())
    return f"a random order of {perm} changes the outputs by {change:.2g} of their largest entry"


def compare_two(pairs: Any, spec: Callable[[], Any], build: Callable[[], nn.Module]) -> str | None:
    """Match two networks by both, and compare the inner products of what they reach."""
    spec = spec()
    params_a, params_b = (_random(build, seed) for seed in (0, 1))
    torch.manual_seed(0)
    perms = pairs.weight_matching(spec, params_a, params_b)
    theirs = inner(spec, [params_a, _permuted(spec, params_b, perms)])
    ours = inner(spec, [params_a, rg.align(params_a, params_b, _symmetry(spec, params_a),
                                           generator=torch.Generator().manual_seed(0)).params])  # fmt: skip
    return _judged(inner(spec, [params_a, params_b]), theirs, ours, None)


def compare_many(sync: Any, spec: Callable[[], Any], build: Callable[[], nn.Module], kind: str) -> str | None:
    """Match three networks at once by both, and compare the sum over all pairs."""
    spec = spec()
    networks = {name: _random(build, seed) for seed, name in enumerate("abc")}
    best = None
    if kind == "three permuted copies":
        best = inner(spec, [networks["a"]] * 3)
        for seed, name in enumerate("bc"):
            sizes = {
                perm: networks["a"][axes[0][0]].shape[axes[0][1]] for perm, axes in spec.perm_to_layers_and_axes.items()
            }
            generator = torch.Generator().manual_seed(seed)
            orders = {perm: torch.randperm(n, generator=generator) for perm, n in sizes.items()}
            networks[name] = _permuted(spec, networks["a"], orders)
    perms, _ = sync.frank_wolfe_synchronized_matching(
        networks, spec, list(networks), sorted(permutations(networks, 2)), 15, "identity", device="cpu"
    )
    # Its permutations lead from the universe to a network: the inverse brings the network there.
    moved = [
        _permuted(spec, one, {p: order.argsort() for p, order in perms[name].items()}) for name, one in networks.items()
    ]
    theirs = inner(spec, moved)
    many = rg.align_many(
        list(networks.values()), _symmetry(spec, networks["a"]), generator=torch.Generator().manual_seed(0)
    )
    ours = inner(spec, list(many.params))
    return _judged(inner(spec, list(networks.values())), theirs, ours, best)


def _judged(first: float, theirs: float, ours: float, best: float | None) -> str | None:
    text = f"inner products: {first:.6g} as given, {theirs:.6g} by the peer, {ours:.6g} by regauge"
    if not ours - first >= 0.999 * (theirs - first):
        raise Failed(text)
    if best is not None and not ours >= (1 - 1e-6) * best:
        raise Failed(f"{text}; the permutations would give {best:.6g}")
    return text if abs(ours - theirs) > 1e-3 * abs(theirs - first) else None


def inner(spec: Any, networks: list[Mapping[str, Tensor]]) -> float:
    """The sum of inner products of all pairs of networks over the tensors that have a permutation."""
    names = [n for n, perms in spec.layer_and_axes_to_perm.items() if any(perms) and n in networks[0]]
    return float(sum(
        (a[name].double() * b[name].double()).sum()
        for k, a in enumerate(networks) for b in networks[:k] for name in names if a[name].is_floating_point()
    ))  # fmt: skip


def _symmetry(spec: Any, params: Mapping[str, Tensor]) -> rg.Symmetry:
    """The symmetry that a specification says, by hand."""
    axes = {
        name: (*perms[: params[name].ndim], *[None] * (params[name].ndim - len(perms)))
        for name, perms in spec.layer_and_axes_to_perm.items()
        if name in params and params[name].ndim and any(perms)
    }
    return rg.Symmetry.from_axes(axes, kinds=dict.fromkeys(spec.perm_to_layers_and_axes, "permutation"))


def _permuted(spec: Any, params: Mapping[str, Tensor], orders: Mapping[str, Tensor]) -> dict[str, Tensor]:
    moved = dict(params)
    for perm, axes in spec.perm_to_layers_and_axes.items():
        for name, axis in axes:
            moved[name] = moved[name].index_select(axis, orders[perm].long())
    return moved


def _build(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def _random(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    """Values as the peer draws them, with noise where it starts with constants."""
    params = {name: tensor.detach().clone() for name, tensor in _build(build, seed).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.1 * torch.randn(t.shape, generator=generator).abs() if t.is_floating_point() and t.ndim == 1 else t
        for name, t in params.items()
    }


def _short(axes: Iterable[tuple[str, int]]) -> str:
    listed = sorted(axes)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(f"axis {axis} of {name}" for name, axis in listed[:3]) + more if listed else "nothing"


def _stand_in(name: str) -> Any:
    """A class for the name of one, from which the peer derives its own."""
    return type(name, (), {}) if name[0].isupper() and not name.isupper() else MagicMock()


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
