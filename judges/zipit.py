"""ZipIt's graphs and its matching by permutations on regauge.

    PEERS=FOLDER .venv/bin/python judges/zipit.py [PIECE-OF-A-NAME ...]

A case passes if

- graph: at each place where a graph of the peer merges, what its handlers move by a permutation are exactly the axes of
  one group of regauge, on the model of the graph;
- copy: of a permuted copy the peer's `match_tensors_permute`, on activations, and `rg.align` by activations both give
  the network back;
- merge: its merged network of two equal ones, by `match_tensors_permute`, computes what `rg.merge` of them does.

SinGAN's graph is that of a sampler which needs images and checkpoints that are not in its repository.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judge import Case, Failed, Peer, absent, declare_torchvision, judge
from specifications import Specification, build, compare_axes, random_params
from torch import Tensor, nn

import regauge as rg

PEER = Peer(
    "ZipIt",
    "https://github.com/gstoica27/ZipIt",
    "1b6ca40ba7fa6203b3bb5511d404f756d3274372",
    ("torchvision==0.29.1", "pillow==13.0.0"),
    ("networkx", "matplotlib", "sklearn", "tqdm", "scipy"),
)
ABSENT = (
    "fvcore", "fvcore.nn", "fvcore.nn.flop_count", "clip", "einops", "ffcv", "ffcv.loader", "ffcv.fields",
    "ffcv.fields.decoders", "ffcv.fields.rgb_image", "ffcv.transforms", "ffcv.transforms.common", "utils",
)  # fmt: skip
"""Modules that it imports to count operations, and for its data."""
EXPLAINED: dict[str, str] = {}
"""Sentences for cases that do not pass."""
SMALL = ("resnet20, width 1", "resnet20, width 2", "vgg11, width 1", "resnet18")
"""Models that are matched."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    declare_torchvision()
    sys.path.insert(0, str(checkout))
    nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign]  # it asks for a GPU by name
    with absent(ABSENT):
        graphs = {name: importlib.import_module(f"graphs.{name}_graph") for name in ("resnet", "vgg")}
        resnets, vgg, merger = (
            importlib.import_module(name) for name in ("models.resnets", "models.vgg", "model_merger")
        )
    import torchvision.models

    models: list[tuple[str, Callable[[], nn.Module], Callable[[nn.Module], Any], int]] = []
    for width in (1, 2, 4, 8):
        models.append((f"resnet20, width {width}", partial(resnets.resnet20, width), graphs["resnet"].resnet20, 32))
    models.append(
        ("resnet20, head of text", partial(resnets.resnet20, 1, text_head=True), graphs["resnet"].resnet20, 32)
    )
    for name in ("vgg11", "vgg16"):
        for width in (1, 2):
            made = partial(getattr(vgg, name), width)
            models.append((f"{name}, width {width}", made, getattr(graphs["vgg"], name), 32))
    for name in ("resnet18", "resnet50"):
        models.append((name, getattr(torchvision.models, name), getattr(graphs["resnet"], name), 64))
    for name, make, graph, pixels in models:
        yield Case(f"graph: {name}", partial(compare_graph, merger, make, graph, pixels))
    for name, make, graph, pixels in models:
        if name in SMALL:
            yield Case(f"copy: {name}", partial(find_copy, merger, make, graph, pixels))
            yield Case(f"merge: {name}", partial(merge_equals, merger, make, graph, pixels))


def compare_graph(merger: Any, make: Callable[[], nn.Module], graph: Any, pixels: int) -> str | None:
    """Compare what the handlers of each place move with the groups of regauge."""
    model = _random(make, 0)
    found = specification(merger, model, graph)
    if not found.axes:
        raise Failed("the graph merges nowhere")
    return compare_axes(model, torch.zeros(2, 3, pixels, pixels), found)


def specification(merger: Any, model: nn.Module, graph: Any) -> Specification:
    """The axes that a permutation at each place of a graph moves."""
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    axes = {}
    for node in _places(graph(model).graphify()):
        moved = copy.deepcopy(model)
        own = graph(moved).graphify()
        size = _size(own, node)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(node))
        matrix = torch.eye(size)[order]
        with torch.no_grad():
            merger.MergeHandler(own, matrix, matrix.T).prop_back(node)
        axes[f"place {node}"] = tuple(_moved_axes(first, moved.state_dict(), order))
    return Specification(axes)


def _moved_axes(first: dict[str, Tensor], second: dict[str, Tensor], order: Tensor) -> Iterable[tuple[str, int]]:
    for name, tensor in first.items():
        if torch.equal(second[name], tensor):
            continue
        fitting = [axis for axis in range(tensor.ndim) if tensor.shape[axis] == len(order)]
        ways = [[axis] for axis in fitting] + [fitting]
        for way in ways:
            wanted = tensor
            for axis in way:
                wanted = wanted.index_select(axis, order)
            if torch.equal(wanted, second[name]):
                yield from ((name, axis) for axis in way)
                break
        else:
            raise Failed(f"{name} is moved by no order of its axes")


def _places(graph: Any) -> list[int]:
    return [node for node in graph.G if graph.get_node_info(node)["type"].name in ("PREFIX", "POSTFIX")]


def _size(graph: Any, node: int) -> int:
    """The channels at a place: those that the next layer behind it reads."""
    following = list(graph.succs(node))
    while following:
        one = following.pop(0)
        info = graph.get_node_info(one)
        if info["type"].name == "MODULE":
            module = graph.get_module(info["layer"])
            if isinstance(module, nn.Conv2d | nn.Linear):
                return module.in_channels if isinstance(module, nn.Conv2d) else module.in_features
        following += graph.succs(one)
    raise Failed(f"no layer reads place {node}")


def find_copy(merger: Any, make: Callable[[], nn.Module], graph: Any, pixels: int) -> str | None:
    """Find the permutations of a copy by activations, by both."""
    model = _random(make, 0)
    spec = specification(merger, model, graph)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    second = spec.permuted(first, spec.orders(first, 1))
    data = _images(pixels)
    theirs = _merged(merger, graph, model, second, data)
    apart = max(float((theirs[1][name] - first[name]).abs().max()) for name in spec.names)
    note = None if apart <= 1e-4 else f"the peer leaves a distance of {apart:.2g}"
    symmetry = rg.discover(model, (data[:2],))
    task = rg.Task(model, [(data, None)], has_targets=False)
    method, generator = rg.ActivationMatching(scales="keep"), torch.Generator().manual_seed(0)
    ours = rg.align(first, second, symmetry, method=method, task=task, generator=generator).params
    far = max(float((ours[name] - first[name]).abs().max()) for name in spec.names)
    if not far <= 1e-6:
        raise Failed(f"regauge leaves a distance of {far:.2g}; the peer {apart:.2g}")
    return note


def merge_equals(merger: Any, make: Callable[[], nn.Module], graph: Any, pixels: int) -> str | None:
    """Merge a network with a permuted copy, by both, and compare what the merged networks compute."""
    model = _random(make, 0)
    spec = specification(merger, model, graph)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    second = spec.permuted(first, spec.orders(first, 1))
    data = _images(pixels)
    both = _merged(merger, graph, model, second, data)
    floating = [name for name, tensor in first.items() if tensor.is_floating_point()]
    theirs = {**first, **{name: (both[0][name] + both[1][name]) / 2 for name in floating}}
    symmetry = rg.discover(model, (data[:2],))
    ours = rg.merge([first, second], symmetry, generator=torch.Generator().manual_seed(0)).params
    with torch.no_grad():
        wanted, peers, own = (torch.func.functional_call(model, one, (data,)) for one in (first, theirs, ours))
    far, apart = (float((one - wanted).abs().max() / wanted.abs().max()) for one in (own, peers))
    if not far <= 1e-5:
        raise Failed(
            f"the merged network of regauge computes something else, by {far:.2g}; that of the peer by {apart:.2g}"
        )
    return None if apart <= 1e-3 else f"the merged network of the peer computes something else, by {apart:.2g}"


def _merged(merger: Any, graph: Any, model: nn.Module, second: dict[str, Tensor], data: Tensor) -> Any:
    """Both networks as the peer transforms them by permutations of activations."""
    matching = importlib.import_module("matching_functions")
    other = copy.deepcopy(model)
    other.load_state_dict(second)
    graphs = [graph(copy.deepcopy(one).eval()).graphify() for one in (model, other)]
    merge = merger.ModelMerge(*graphs, device="cpu")
    with torch.no_grad():
        merge.compute_metrics(((data, torch.zeros(len(data))),), {"covariance": merger.CovarianceMetric})
        merge.compute_transformations(matching.match_tensors_permute)
        merge.apply_transformations()
    return [{name: tensor.detach().clone() for name, tensor in one.model.state_dict().items()} for one in graphs]


def _images(pixels: int) -> Tensor:
    return torch.randn(16, 3, pixels, pixels, generator=torch.Generator().manual_seed(5))


def _random(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with other values on each unit, statistics included."""
    model = build(make, seed).eval()
    model.load_state_dict(random_params(make, seed))
    return model


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
