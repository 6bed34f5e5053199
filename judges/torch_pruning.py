"""Torch-Pruning's models and tests on regauge: every group that it cuts, and every network that it makes smaller.

    PEERS=FOLDER .venv/bin/python judges/torch_pruning.py [PIECE-OF-A-NAME ...]

Cases are the models of its example for torchvision (its list of failures left out), and its tests. Its code runs as it
is, on untrained models and images of 64 pixels, and what it removes is watched. A case passes if

1. each set of channels that it removes together is a union of whole units of regauge's groups, with all that these have
   in any tensor; axes of inputs and outputs belong to no group, and only there may it cut more;
2. `rg.prune` of the same units gives its tensors, to 1e-6 of their largest entry, all of them;
3. the smaller module of `rg.prune` runs and computes what the peer's does, to 1e-9 of the largest entry, in float64.

Without values (point 1 and the shapes of 2) are models of more than 12 million values; without point 3 those of more
than 6 million. Detectors are discovered without the choice of boxes, which depends on data.
"""

import ast
import copy
import inspect
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judge import Case, Failed, Peer, declare_torchvision, judge
from torch import Tensor, nn

import regauge as rg
from regauge.pruning.criteria import Criterion
from regauge.pruning.slices import cut_symmetry

PEER = Peer(
    "Torch-Pruning",
    "https://github.com/VainF/Torch-Pruning",
    "e80127d7c6935c319a7dd6719b8a72e3c1fcbff9",
    ("torchvision==0.29.1", "pillow==13.0.0"),
)
MODELS = "examples/torchvision_models/torchvision_pruning.py"
NOT_THERE = ("swin", "raft", "shufflenet")
"""Models that the example names as its own failures, and does not run."""
WITHOUT_GRAPHS = ("test_benchmark.py", "test_backward.py")
"""Speed on a GPU; and models of the list once more, with a backward pass afterwards."""
PIXELS = 64
LARGER = {"vit_h_14": 112}
"""Models whose patches need other images."""
VALUED, RUN = 12e6, 6e6
EXPLAINED = {
    "test: test_concat_split.py::test_pruner": (
        "Torch-Pruning takes the two halves of this split for each other: the columns that it removes from block2.0 "
        "are those of the other half of the channels that it removes from block1.3"
    ),
    "test: test_serialization.py::test_serialization": (
        "the test gives no number of heads. Torch-Pruning therefore removes the same channels from the rows of "
        "queries, keys and values as from the stream, from each head another number; the rows that are left are split "
        "anew into heads of equal length, and channels change heads. regauge removes equally many from each head"
    ),
}
"""Sentences for cases that do not pass."""
ENDS = ("output of the model", "tied to an input or a constant")
"""Reasons of axes whose length is that of an input or output."""
Removed = dict[tuple[str, int], Tensor]
"""For axes of tensors the indices that are removed."""


@dataclass
class Watched:
    """A model that the peer cuts: as it was, and what is left of each axis."""

    graph: Any
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: nn.Module
    left: Removed = field(default_factory=dict)
    events: list[Removed] = field(default_factory=list)

    def note(self, group: Any, *, is_cut: bool) -> None:
        """Note what the peer removes with a group, by removing it from numbered entries."""
        event: Removed = {}
        for item in group:
            dep, idxs = item[0], item[1]
            target = dep.target.module
            if isinstance(target, nn.Parameter):
                name = self.graph._param_to_name[target]
                dep.handler.__self__.pruning_dim = dep.target.pruning_dim
                found = _cut(name, target, lambda numbers, dep=dep, idxs=idxs: dep.handler(numbers, list(idxs)))
            elif target in self.graph._module2name:
                prefix = self.graph._module2name[target]
                found = _cut_module(prefix, target, dep, list(idxs))
            else:
                continue
            for key, gone in found.items():
                event[key] = torch.cat([event[key], gone]).unique() if key in event else gone
        self.take(event, is_cut=is_cut)

    def take(self, event: Removed, *, is_cut: bool) -> None:
        """Take a set of removals, in indices of the model as it is now."""
        first = self.first.state_dict()
        known: Removed = {}
        for (name, axis), gone in event.items():
            left = self.left.get((name, axis), torch.arange(first[name].shape[axis]))
            known[name, axis] = left[gone]
            if is_cut:
                mask = torch.ones(len(left), dtype=torch.bool)
                mask[gone] = False
                self.left[name, axis] = left[mask]
        if known:
            self.events.append(known)


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    declare_torchvision()
    torch.compiler.set_stance("force_eager")
    sys.path.insert(0, str(checkout))
    import torchvision.ops.boxes

    # Its operator is compiled for a torch with CUDA; which boxes are chosen matters for nothing here.
    torchvision.ops.boxes.nms = lambda boxes, scores, _: scores.argsort(descending=True)[:20]
    os.chdir(tempfile.mkdtemp(prefix="judge-torch-pruning-"))
    tree = ast.parse((checkout / MODELS).read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for name in (one.name for one in node.names):
                if not name.startswith(NOT_THERE):
                    yield Case(f"model: {name}", partial(run_model, checkout / MODELS, name))
    for path in sorted((checkout / "tests").glob("test_*.py")):
        if path.name in WITHOUT_GRAPHS:
            continue
        tests = [one.name for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef)]
        for test in [name for name in tests if name.startswith("test_")] or [None]:
            yield Case(f"test: {path.name}" + (f"::{test}" if test else ""), partial(run_test, path, test))


def run_model(path: Path, name: str) -> str | None:
    """Run the example on one of its models, and compare."""
    pixels = LARGER.get(name, PIXELS)
    tree = _smaller_images(ast.parse(path.read_text()), pixels)
    block = next(node for node in tree.body if isinstance(node, ast.If))
    block.body = [node for node in block.body if not (isinstance(node, ast.Assign) and _assigns(node, "entries"))]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(ast.Module(imports, []), str(path), "exec"), space)
    build = _untrained(space[name], pixels)
    with torch.device("meta"):
        size = sum(p.numel() for p in build().parameters())
    is_large = size > VALUED and "detection" not in space[name].__module__  # Boxes are chosen by values.
    with watching() as watched, _without_values() if is_large else _as_it_is():
        space["entries"] = {name: _on_meta(build) if is_large else build}
        exec(compile(ast.Module(block.body, []), str(path), "exec"), space)
    return compare(watched, has_values=not is_large, is_run=size <= RUN)


def run_test(path: Path, test: str | None) -> str | None:
    """Run a test, or a script without tests, and compare."""
    import torchvision.models

    space: dict[str, Any] = {"__name__": "judged", "__file__": str(path)}
    made: list[tuple[nn.Module, nn.Module]] = []

    def entry(function: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> nn.Module:
            if kwargs.pop("pretrained", False):  # The same values at each call.
                torch.manual_seed(0)
            model = _untrained(function)(*args, **kwargs)
            made.append((model, copy.deepcopy(model).eval()))
            return model

        return build

    tree = _smaller_images(ast.parse(path.read_text()))
    names = [
        a.name
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module == "torchvision.models"
        for a in n.names
    ]
    kept = {name: getattr(torchvision.models, name) for name in names}
    with watching() as watched:
        try:
            for name, function in kept.items():
                setattr(torchvision.models, name, entry(function))
            exec(compile(tree, str(path), "exec"), space)
            if test is not None:
                space[test]()
        finally:
            for name, function in kept.items():
                setattr(torchvision.models, name, function)
    if not watched:  # It cuts layers one by one.
        (model, first) = made[-1]
        watched.append(Watched(None, model, (torch.randn(1, 3, PIXELS, PIXELS),), {}, first))
        watched[0].take(_by_values(first, model), is_cut=True)
    size = max(sum(p.numel() for p in one.first.parameters()) for one in watched)
    return compare(watched, has_values=size <= VALUED, is_run=size <= RUN)


@contextmanager
def watching() -> Any:
    """Watch every model whose dependency graph is built, and every group that is cut, or only made."""
    import torch_pruning as tp

    watched: dict[int, Watched] = {}
    graph, group = tp.DependencyGraph, tp.dependency.Group
    build, prune, find = graph.build_dependency, group.prune, graph.get_pruning_group
    made: list[tuple[Watched, Any]] = []

    def build_watched(self: Any, model: nn.Module, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in model.parameters():  # Some tests take values from memory as it is.
            sizes = parameter.detach().abs()
            is_odd = ~sizes.isfinite() | (sizes > 1e4) | ((sizes > 0) & (sizes < 1e-20))
            if not parameter.is_meta and bool(is_odd.any()):
                parameter.data = torch.rand_like(parameter)
        for one in watched.values():
            if one.model is model:  # It is cut once more: what the first cut left is kept.
                one.model = copy.deepcopy(model)
        result = build(self, model, example_inputs, *args, **kwargs)
        inputs = (), example_inputs
        if not isinstance(example_inputs, dict):
            try:
                model(*example_inputs)
                inputs = tuple(example_inputs), {}
            except Exception:  # As the peer does.
                inputs = (example_inputs,), {}
        watched[id(self)] = Watched(self, model, *inputs, copy.deepcopy(model).eval())
        return result

    def note_uncut(cutting: Any = None) -> None:
        """Note the groups of graphs that cut nothing, before another graph changes their layers."""
        for one, items in made:
            if not one.left and one.graph is not cutting:
                one.note(items, is_cut=False)
        made[:] = [(one, items) for one, items in made if one.graph is cutting]

    def prune_watched(self: Any, idxs: Any = None, record_history: bool = True) -> None:
        note_uncut(self._DG)
        if idxs is None and id(self._DG) in watched:
            watched[id(self._DG)].note(self, is_cut=True)
        prune(self, idxs, record_history)

    def find_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = find(self, *args, **kwargs)
        if id(self) in watched:
            made.append((watched[id(self)], result))
        return result

    graph.build_dependency, group.prune, graph.get_pruning_group = build_watched, prune_watched, find_watched
    found: list[Watched] = []
    try:
        yield found
    finally:
        graph.build_dependency, group.prune, graph.get_pruning_group = build, prune, find
    found += watched.values()
    note_uncut()


def compare(watched: Iterable[Watched], *, has_values: bool, is_run: bool) -> str | None:
    """Raise `Failed` where regauge couples other entries than the peer, or makes another network."""
    notes: dict[str, None] = {}
    count = 0
    for one in watched:
        if not one.events:
            continue
        count += len(one.events)
        module, args, kwargs = _static(one)
        symmetry = rg.discover(module, args, kwargs or None)
        own = set(module.state_dict())
        units = {
            group.name: torch.zeros(symmetry.count_copies(group.name), group.size, dtype=torch.bool)
            for group in symmetry.groups
        }
        outside: set[tuple[str, int]] = set()
        for event in one.events:
            event = {key: gone for key, gone in event.items() if key[0] in own}
            couple(symmetry, event, units if one.left else {n: torch.zeros_like(u) for n, u in units.items()}, outside)
        if outside:
            notes["it also cuts inputs or outputs of the model, which belong to no group"] = None
        if one.left:
            note = compare_networks(one, module, symmetry, units, outside, has_values=has_values, is_run=is_run)
            notes |= dict.fromkeys(note)
        else:
            notes["nothing is cut here: its groups are compared"] = None
    if not count:
        raise Failed("the peer built no group")
    return "; ".join(notes) or None


def couple(symmetry: rg.Symmetry, event: Removed, units: Mapping[str, Tensor], outside: set[tuple[str, int]]) -> None:
    """Find the units that the peer removes together, and raise `Failed` unless it removes all that they have."""
    bases = {base for group in symmetry.groups for base in group.within}
    shapes = symmetry.shapes
    hits = {key: torch.zeros(shapes[key[0]][key[1]], dtype=torch.bool) for key in event if key[0] in shapes}
    for key, hit in hits.items():
        hit[event[key]] = True
    now = {name: torch.zeros_like(mask) for name, mask in units.items()}
    part = {name: torch.zeros_like(mask) for name, mask in units.items()}
    for (name, axis), hit in hits.items():
        for site in symmetry.sites.get(name, ()):
            if site.placement.axis == axis:
                here, group = hit[site.positions], site.group.name
                _mark(symmetry, site, now[group], here)
                _mark(symmetry, site, part[group], ~here)
    ends = {(one.parameter, one.axis) for one in symmetry.frozen if one.reason.endswith(ENDS)}
    single = {(name, axis) for name, axis in hits if shapes[name][axis] == 1}  # One entry has no order.
    ends |= single - {(name, site.placement.axis) for name, _ in single for site in symmetry.sites.get(name, ())}
    is_outside = not ends.isdisjoint(hits)
    for name in [group.name for group in symmetry.groups if is_outside and not _is_ordered(group)]:
        now[name].zero_()
    for name in bases:  # A copy is removed if all of it is.
        now[name] &= ~part[name]
    for name in {name for name, _ in hits}:
        for axis in range(len(shapes[name])):
            hit = hits.get((name, axis), torch.zeros(shapes[name][axis], dtype=torch.bool))
            expected, owned = torch.zeros_like(hit), torch.zeros_like(hit)
            for site in symmetry.sites.get(name, ()):
                if site.placement.axis == axis and (not is_outside or _is_ordered(site.group)):
                    expected[site.positions] |= _read(symmetry, site, now[site.group.name])
                    owned[site.positions] = True
            if bool((hit & ~owned).any()):
                if not is_outside:
                    why = next((one.reason for one in symmetry.frozen if (one.parameter, one.axis) == (name, axis)), "")
                    raise Failed(f"it cuts axis {axis} of {name}, which regauge leaves: {why or 'no group'}")
                outside.add((name, axis))
            if bool((expected & ~hit).any()):
                groups = {s.group.name for s in symmetry.sites[name] if s.placement.axis == axis}
                raise Failed(
                    f"it leaves {int((expected & ~hit).sum())} of {int(expected.sum())} entries of axis {axis} "
                    f"of {name} whose units ({', '.join(sorted(groups))}) it removes elsewhere"
                )
            if bool((hit & owned & ~expected).any()):
                raise Failed(f"it cuts a part of units on axis {axis} of {name}")
    reached = {s.placement.parameter for s in _sites(symmetry) if bool(now[s.group.name].any())}
    for name in reached - {name for name, _ in hits} - set(symmetry.buffers):
        site = next(s for s in symmetry.sites[name] if bool(now[s.group.name].any()))
        if bool(_read(symmetry, site, now[site.group.name]).any()):
            raise Failed(
                f"it leaves {name} as it is, although {site.group.name} acts on its axis {site.placement.axis}"
            )
    for name, mask in now.items():
        units[name].logical_or_(mask)


def _is_ordered(group: rg.Group) -> bool:
    """Whether units can be removed: the entries of an output stay in their order, and have factors at most."""
    return group.is_permuted or group.is_base or group.matrix != "none"


def _sites(symmetry: rg.Symmetry) -> Iterable[Any]:
    return (site for local in symmetry.sites.values() for site in local)


def _copies(symmetry: rg.Symmetry, site: Any) -> Tensor | None:
    """The copy of each position of a site; None where another axis decides it."""
    copies = torch.zeros(len(site.positions), dtype=torch.int64)
    for base, (other, index) in zip(site.group.within, site.bases, strict=True):
        if other is not None:
            return None
        copies = copies * symmetry[base].size + index
    return copies


def _mark(symmetry: rg.Symmetry, site: Any, mask: Tensor, here: Tensor) -> None:
    copies = _copies(symmetry, site)
    if copies is None:
        mask[:, site.units[here]] = True
    else:
        mask[copies[here], site.units[here]] = True


def _read(symmetry: rg.Symmetry, site: Any, mask: Tensor) -> Tensor:
    copies = _copies(symmetry, site)
    return mask.any(0)[site.units] if copies is None else mask[copies, site.units]


@dataclass(frozen=True)
class Chosen(Criterion):
    """The units that the peer removed."""

    units: Mapping[str, Tensor]

    def scores(self, network: Any, groups: tuple[str, ...], generator: torch.Generator | None) -> Any:
        """Zero for these."""
        found = {name: (~self.units[name]).double() for name in groups}
        for name in groups:
            if network.symmetry[name].matrix != "none":  # Directions, with the largest singular values first.
                found[name] = -torch.arange(found[name].shape[1]).double().expand(found[name].shape)
        return found


def compare_networks(
    one: Watched,
    module: nn.Module,
    symmetry: rg.Symmetry,
    units: Mapping[str, Tensor],
    outside: set[tuple[str, int]],
    *,
    has_values: bool,
    is_run: bool,
) -> list[str]:
    """Cut the same units with `rg.prune`, and compare with the network of the peer."""
    sizes = {}
    for name, mask in units.items():
        if not _is_ordered(symmetry[name]):
            continue
        counts = mask.sum(1)
        if bool((counts != counts[0]).any()):
            raise Failed(f"it removes other numbers of units from the copies of {name}: {sorted({*counts.tolist()})}")
        if int(counts[0]):
            sizes[name] = int(counts[0])
    theirs = {name: tensor for name, tensor in one.model.state_dict().items() if name in module.state_dict()}
    small = cut_symmetry(symmetry.bind(module.state_dict()), {n: symmetry[n].size - k for n, k in sizes.items()})
    for name, tensor in theirs.items():
        shape = list(small.shapes.get(name, tensor.shape))
        for axis in (axis for other, axis in outside if other == name):
            shape[axis] = tensor.shape[axis]
        if list(tensor.shape) != shape:
            raise Failed(f"{name} has the shape {tuple(tensor.shape)}, in regauge {tuple(shape)}")
    if not has_values:
        return ["as large as it is: groups and shapes without values"]
    share = {name: count / symmetry[name].size for name, count in sizes.items()}
    first = module.state_dict()
    result = rg.prune(first, symmetry, share=share, criterion=Chosen(units))
    ours = result.params
    mixed = [name for name in sizes if symmetry[name].matrix != "none"]
    directions = {place.parameter for name in mixed for place in symmetry[name].placements}
    for family in symmetry.translations:
        directions |= {*family.parameters} if directions & {*family.parameters} else set()
    cut = {name: _slice(first[name], one.left, name, range(first[name].ndim)) for name in theirs}
    made = {name: _slice(ours[name], one.left, name, [a for other, a in outside if other == name]) for name in theirs}
    is_moved = any(not torch.equal(cut[name], theirs[name]) for name in theirs)
    compared = [name for name in theirs if name not in directions and theirs[name].is_floating_point()]
    worst, far = _worst(cut, made, compared)
    notes = [] if is_run else ["as large as it is: groups and tensors, but no runs"]
    if far > 1e-6 and not outside:
        worst, far = _worst(*(result.symmetry.split(_double(one))[0] for one in (cut, made)), compared)
        notes.append("up to a translation that normalization takes away: a mean is over fewer units")
    if far > 1e-6:
        raise Failed(f"{worst} differs by {far:.2g} of its largest entry")
    if is_moved:
        return ["its tensors get other values after it has cut them: those that it cut are compared"]
    if mixed:
        notes.append(
            "where a matrix mixes units, regauge cuts as many directions, those of the smallest singular values"
        )
    if not is_run or outside:
        return notes
    task = rg.Task(module, [(one_input(one, module), None)], has_targets=False)
    result = rg.prune(first, symmetry, share=share, criterion=Chosen(units), task=task)
    assert result.module is not None
    assert result.certificate is not None
    if not result.certificate.ok:
        raise Failed(str(result.certificate))
    with torch.no_grad():
        module, args, kwargs = _static(one, one.model)
        for inputs in (_double(args),):
            wanted = _tensors(copy.deepcopy(module).double().eval()(*inputs, **_double(kwargs)))
            found = _tensors(result.module.double().eval()(*inputs, **_double(kwargs)))
    if mixed and [one.shape for one in wanted] == [one.shape for one in found]:
        return notes
    if result.exact:
        return [
            *notes,
            f"regauge also removes units that these values make superfluous, such as {result.exact[0].why} ones",
        ]
    for a, b in zip(wanted, found, strict=True):
        far = float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) if a.shape == b.shape else float("inf")
        if not far <= 1e-9:
            raise Failed(f"outputs differ by {far:.2g} of their largest entry")
    return notes


def _slice(tensor: Tensor, left: Removed, name: str, axes: Iterable[int]) -> Tensor:
    """A tensor with what the peer left of some axes."""
    for axis in axes:
        tensor = tensor.index_select(axis, left[name, axis]) if (name, axis) in left else tensor
    return tensor


def _worst(first: Mapping[str, Tensor], second: Mapping[str, Tensor], names: Iterable[str]) -> tuple[str, float]:
    """The largest difference relative to the largest entry of its tensor, and where it is."""
    found = {
        n: (second[n].double() - first[n].double()).abs().max() / first[n].abs().max().clamp(min=1e-30) for n in names
    }
    worst = max(found, key=lambda name: float(found[name]))
    return worst, float(found[worst])


def one_input(one: Watched, module: nn.Module) -> Any:
    """The inputs as a task takes them."""
    _, args, kwargs = _static(one)
    return kwargs or (args if len(args) != 1 else args[0])


def _cut(name: str, tensor: Tensor, cut: Any) -> Removed:
    """The indices that something removes from the axes of a tensor."""
    return {(name, axis): gone for axis, gone in _gone(tensor, cut(nn.Parameter(_numbers(tensor))))}


def _cut_module(prefix: str, module: nn.Module, dep: Any, idxs: list[int]) -> Removed:
    probe = copy.deepcopy(module)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for path, inner in probe.named_modules():
        for leaf, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is not None and tensor.is_floating_point():
                numbers = _numbers(tensors[f"{path}.{leaf}" if path else leaf])
                setattr(inner, leaf, nn.Parameter(numbers) if leaf in inner._parameters else numbers)
    dep.handler(probe, idxs)
    after = dict([*probe.named_parameters(), *probe.named_buffers()])
    dot = f"{prefix}." if prefix else ""
    return {
        (dot + name, axis): gone
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
        for axis, gone in _gone(tensor, after[name])
    }


def _by_values(first: nn.Module, model: nn.Module) -> Removed:
    """The lines of tensors that are gone, where one axis of each was cut."""
    event: Removed = {}
    for name, tensor in model.state_dict().items():
        was = first.state_dict()[name]
        for axis in (axis for axis in range(was.ndim) if was.shape[axis] != tensor.shape[axis]):
            left = [line.contiguous() for line in tensor.unbind(axis)]
            gone = [not any(torch.equal(line, one) for one in left) for line in was.unbind(axis)]
            event[name, axis] = torch.tensor(gone).nonzero().flatten()
    return event


def _numbers(tensor: Tensor) -> Tensor:
    """The number of each entry."""
    dtype = torch.float32 if tensor.numel() < 1 << 24 else torch.float64
    return torch.arange(tensor.numel(), dtype=dtype).reshape(tensor.shape)


def _gone(before: Tensor, after: Tensor) -> Iterable[tuple[int, Tensor]]:
    if before.shape != after.shape:
        for axis, size in enumerate(before.shape):
            if after.shape[axis] < size:
                kept = after.detach().movedim(axis, 0)
                line = (kept.flatten(1)[:, 0] if kept.ndim > 1 and len(kept) else kept.flatten()).long()
                stride = int(torch.tensor(before.shape[axis + 1 :]).prod())
                mask = torch.ones(size, dtype=torch.bool)
                mask[line // stride % size] = False
                yield axis, mask.nonzero().flatten()


class Dense(nn.Module):
    """A detector without the choice of boxes: what it computes of every image alike."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone = model.backbone
        if hasattr(model, "rpn"):
            self.rpn = model.rpn
        else:
            self.head = model.head

    def forward(self, images: Tensor) -> Any:
        """The outputs of the head at all places."""
        features = list(self.backbone(images).values())
        return self.rpn.head(features) if hasattr(self, "rpn") else self.head(features)


def _static(one: Watched, model: nn.Module | None = None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model as it was unless one is given, or the part of it that does not choose boxes, with its inputs."""
    model = one.first if model is None else model
    if hasattr(model, "rpn") or hasattr(model, "anchor_generator"):
        size = {"ssd": 300}.get(type(model).__name__.lower(), 64)
        images = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        return Dense(model).eval(), (images,), {}
    return model, one.args, one.kwargs


def _tensors(outputs: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(outputs) if isinstance(one, Tensor)]


def _double(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda one: one.double(), tree)


def _untrained(function: Any, pixels: int = PIXELS) -> Any:
    """A factory of torchvision that loads nothing, for small images."""
    known = inspect.signature(function).parameters
    more = {"weights_backbone": None} if "weights_backbone" in known else {}
    if function.__name__.startswith("vit"):
        more["image_size"] = pixels
    if "rcnn" in function.__name__ or function.__name__.startswith("fcos"):
        more |= {"min_size": PIXELS, "max_size": 2 * PIXELS}
    return partial(function, **more)


def _smaller_images(tree: ast.Module, pixels: int = PIXELS) -> ast.Module:
    """The code with images of a quarter of the sides."""

    class Change(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            return ast.copy_location(ast.Constant({224: pixels, 299: 96}.get(node.value, node.value)), node)

    return Change().visit(tree)


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in node.targets)


def _on_meta(build: Any) -> Any:
    def made(**kwargs: Any) -> nn.Module:
        with torch.device("meta"):
            return build(**kwargs)

    return made


@contextmanager
def _as_it_is() -> Any:
    yield


@contextmanager
def _without_values() -> Any:
    """Build models without values, and let the peer choose channels at random."""
    import torch_pruning as tp

    kept = tp.importance.GroupMagnitudeImportance, tp.pruner.GroupNormPruner, nn.Module.cpu
    tp.importance.GroupMagnitudeImportance = lambda p: lambda group: torch.rand(len(group[0][1]))
    tp.pruner.GroupNormPruner = type("Bare", (tp.pruner.BasePruner,), {"regularize": lambda self, model: None})
    nn.Module.cpu, randn = lambda self: self, torch.randn
    torch.randn = partial(randn, device="meta")
    try:
        yield
    finally:
        tp.importance.GroupMagnitudeImportance, tp.pruner.GroupNormPruner, nn.Module.cpu = kept
        torch.randn = randn


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
