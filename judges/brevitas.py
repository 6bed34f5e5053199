"""Brevitas's tests of graph equalization and rotation on regauge.

    PEERS=FOLDER .venv/bin/python judges/brevitas.py [PIECE-OF-A-NAME ...]

Its tests run as they are, on its fixtures and on untrained models of torchvision with images of 64 pixels (96 for
Inception), and the regions that they equalize or rotate are watched. A case passes if the test passes and

1. on every channel of every region all sources and sinks have the same unit of one group of regauge, with a family of
   scales or a matrix for an equalization, with a matrix for a rotation;
2. where it equalizes: in float64 its equalized network is on the orbit of the network as it was, to 1e-9
   (`orbit_distance`), if it has at most 5 million values;
3. `rg.gauge(method=Equalize())` changes every source and sink, and keeps outputs to 1e-9, if the network has at most
   12 million values.

Of `test_apply_rotate` the cases with fused random rotations of the module itself are run: others have the same regions.
Sinks without sources are rotated by an operation that is added to the model, which is no gauge.
"""

import copy
import importlib
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judge import Case, Failed, Peer, declare_torchvision, judge, sentence
from torch import Tensor, nn

import regauge as rg

PEER = Peer(
    "brevitas",
    "https://github.com/Xilinx/brevitas",
    "b106358c4169d8a9b68cb2a531aa795417d74887",
    (
        "torchvision==0.29.1", "pillow==13.0.0", "dependencies==2.0.1", "unfoldNd==0.2.3", "pytest-cases==3.10.1",
        "decopatch==1.4.10", "makefun==1.16.0", "setuptools==80.9.0", "pytest==8.3.5",
    ),
    ("pluggy", "sympy", "tqdm"),
)  # fmt: skip
SUITE = "tests/brevitas/graph/test_equalization.py"
TESTS = {
    "test_resnet18_equalization": "",
    "test_equalization_torchvision_models": "",
    "test_models": "",
    "test_models_rotation_fixtures": "",
    "test_apply_rotate": "no-fx-fused-cpu-ort",
}
"""Tests, and the parts of their names that all of their cases have."""
COMPARED, GAUGED = 5e6, 12e6
SHUFFLED = (
    "regauge leaves the scales of channels that repeated shuffles have split into single ones; they exist, and "
    "Brevitas finds them by its walk through the graph"
)
EXPLAINED = {f"test_equalization_torchvision_models[shufflenet_v2_x0_5-{merge}]": SHUFFLED for merge in (True, False)}
"""Sentences for cases that do not pass."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    declare_torchvision()
    # Its fixtures need an older pytest than regauge's tests.
    packages = next(one for one in sys.path if one.endswith(f"/.packages/{PEER.name}"))
    sys.path[:0] = [str(checkout / "src"), str(checkout), packages]
    os.chdir(checkout)
    import torchvision.models

    equalize = importlib.import_module("brevitas.graph.equalize")
    fixtures = importlib.import_module("tests.brevitas.graph.equalization_fixtures")
    for name in fixtures.MODELS:
        setattr(torchvision.models, name, partial(_untrained, getattr(torchvision.models, name)))
    watch = Watch(equalize, fixtures)
    _pytest([str(checkout / SUITE), "--collect-only"], watch)
    for item in watch.items:
        yield Case(item.partition("::")[2], partial(run, checkout / SUITE, item.partition("::")[2], watch))


def run(suite: Path, name: str, watch: "Watch") -> str | None:
    """Run a test of the peer with the checks."""
    watch.reason, watch.notes, watch.regions = None, {}, 0
    code = _pytest([f"{suite}::{name}"], watch)
    if code:
        raise Failed(watch.reason or f"pytest ends with {code}")
    if not watch.regions:
        return "no region with sources: an operation is added, and no gauge chosen"
    return "; ".join(watch.notes) or None


class Watch:
    """A plugin of pytest that checks what the peer equalizes and rotates."""

    def __init__(self, equalize: Any, fixtures: Any) -> None:
        self.equalize, self.fixtures = equalize, fixtures
        self.items: list[str] = []
        self.regions = 0
        self.reason: str | None = None
        self.notes: dict[str, None] = {}
        self.shape: tuple[int, ...] = ()
        self.apply_rotate = equalize._apply_rotate
        self.equalize_test = fixtures.equalize_test
        equalize._apply_rotate = self.rotate

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests that are cases, and put the checks into their module."""
        kept = []
        for item in items:
            piece = TESTS.get(item.originalname)
            if piece is not None and piece in item.name:
                kept.append(item)
            item.module.equalize_test, item.module._apply_rotate = self.equalize_scales, self.rotate
        items[:] = kept
        self.items = [item.nodeid for item in items]

    def pytest_runtest_setup(self, item: Any) -> None:
        """Smaller images."""
        pixels = 96 if "inception" in item.name else 64
        item.module.IN_SIZE_CONV = (1, 3, pixels, pixels)
        if "rotation_fixtures" in item.name:
            self.shape = (1, 4, 4)
        elif "apply_rotate" in item.name:
            self.shape = (5, self.fixtures.IN_FEATURES)
        else:
            self.shape = item.module.IN_SIZE_LINEAR if "mha" in item.name else item.module.IN_SIZE_CONV

    def pytest_exception_interact(self, call: Any) -> None:
        """Keep the reason of a failure."""
        error = call.excinfo.value
        self.reason = str(error) if isinstance(error, Failed) else sentence(error)

    def rotate(self, model: nn.Module, regions: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Check the regions that are rotated."""
        own = copy.deepcopy(model)
        for name in [name for names in rg.discover(model, (torch.randn(self.shape),)).tied for name in names]:
            owner, _, leaf = name.rpartition(".")
            setattr(own.get_submodule(owner), leaf, nn.Parameter(getattr(model.get_submodule(owner), leaf).clone()))
            self.notes["tied weights get a tensor of their own under each name, as the peer gives them"] = None
        self.check_regions(self.discover(own), model, regions, is_rotated=True)
        return self.apply_rotate(model, regions, *args, **kwargs)

    def equalize_scales(self, model: nn.Module, regions: list[Any], **kwargs: Any) -> Any:
        """Check the regions that are equalized, and the networks before and after in float64."""
        symmetry = self.discover(model)
        self.check_regions(symmetry, model, regions, is_rotated=False)
        size = sum(p.numel() for p in model.parameters())
        if size <= GAUGED:
            self.check_networks(symmetry, model, regions, kwargs, is_compared=size <= COMPARED)
        else:
            self.notes["as large as it is: regions, but no runs"] = None
        return self.equalize_test(model, regions, **kwargs)

    def discover(self, model: nn.Module) -> rg.Symmetry:
        """The symmetry of a model that the peer traced."""
        dtype = next(p.dtype for p in model.parameters())
        return rg.discover(copy.deepcopy(model).eval(), (torch.randn(self.shape, dtype=dtype),))

    def check_regions(self, symmetry: rg.Symmetry, model: nn.Module, regions: list[Any], *, is_rotated: bool) -> None:
        """Raise `Failed` where a region is more than one group."""
        owners: dict[tuple[str, int], dict[int, set[tuple[str, int, int]]]] = {}
        for name, local in symmetry.sites.items():
            for site in local:
                group = site.group
                is_mixed = group.matrix != "none" or (is_rotated and group.behind_gains != "none")  # Gains are folded.
                if not is_mixed and (is_rotated or not group.scales):
                    continue
                copies = torch.zeros(len(site.positions), dtype=torch.int64)
                for base, (other, index) in zip(group.within, site.bases, strict=True):
                    copies = copies * symmetry[base].size + (index if other is None else 0)
                places = owners.setdefault((name, site.placement.axis), {})
                for position, copy_, unit in zip(
                    site.positions.tolist(), copies.tolist(), site.units.tolist(), strict=True
                ):
                    places.setdefault(position, set()).add((group.name, copy_, unit))
        for region in regions:
            if not region.srcs:
                continue
            self.regions += 1
            channels: dict[int, list[tuple[str, int, int]]] = {}
            for name, indexes in region.srcs.items():
                tensor, axis = self.place(model, region, name, is_source=True)
                for k in range(indexes.start, indexes.end):
                    channels.setdefault(indexes.offset + k, []).append((tensor, axis, k))
            for name, indexes in region.sinks.items():
                tensor, axis = self.place(model, region, name, is_source=False)
                for k in range(indexes.start, indexes.end):
                    channels.setdefault(indexes.offset + k - indexes.start, []).append((tensor, axis, k))
            for channel, places in channels.items():
                if any(axis is None for _, axis, _ in places):
                    continue  # The peer leaves such regions as they are.
                found = [owners.get((tensor, axis), {}).get(k, set()) for tensor, axis, k in places]
                if is_rotated:
                    found = [{(group, 0, 0) for group, _, _ in units} for units in found]
                if not set.intersection(*found):
                    lacking = [place for place, units in zip(places, found, strict=True) if not units] or places
                    raise Failed(
                        f"channel {channel} of {sorted(region.srcs_names)} to {sorted(region.sinks_names)} is no unit: "
                        f"see axis {lacking[0][1]} of {lacking[0][0]}"
                    )

    def place(self, model: nn.Module, region: Any, name: str, *, is_source: bool) -> tuple[str, Any]:
        """The tensor and axis of a source or sink."""
        module, path = region.get_module_from_name(name), name.split("$")[0]
        path = next((known for known, one in model.named_modules() if one is module), path)
        axis = (self.equalize._get_output_axis if is_source else self.equalize._get_input_axis)(module)
        if isinstance(module, nn.MultiheadAttention):
            return f"{path}.{'out_proj.weight' if is_source else 'in_proj_weight'}", axis
        return f"{path}.weight", axis

    def check_networks(
        self, symmetry: rg.Symmetry, model: nn.Module, regions: list[Any], kwargs: Any, *, is_compared: bool
    ) -> None:
        """Compare networks before and after in float64, the peer's and that of regauge."""
        wide = copy.deepcopy(model).double().eval()
        before = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
        inputs = torch.randn(self.shape, dtype=torch.float64)
        first = _first(wide(inputs))
        if is_compared:
            unwanted = (nn.LayerNorm, *self.equalize._batch_norm)
            sinks = tuple(one for one in self.equalize._supported_layers if one not in unwanted)
            moved = copy.deepcopy(wide)
            own = self.equalize._extract_regions(moved, state_impl_kwargs={"supported_sinks": sinks})
            self.equalize_test(moved, own, **kwargs)
            after = {name: tensor.clone() for name, tensor in moved.state_dict().items()}
            size = float(sum(t.square().sum() for t in before.values() if t.is_floating_point())) ** 0.5
            far = rg.canonical.orbit_distance(before, after, symmetry) / size
            if not far <= 1e-9:
                change = float((_first(moved(inputs)) - first).abs().max() / first.abs().max())
                raise Failed(
                    f"its network is {far:.2g} of its length off the orbit; its outputs change by {change:.2g}"
                )
        result = rg.gauge(before, symmetry, method=rg.Equalize())
        with torch.no_grad():
            ours = _first(torch.func.functional_call(wide, result.params, (inputs,)))
        change = float((ours - first).abs().max() / first.abs().max())
        if not change <= 1e-9:
            raise Failed(f"rg.gauge changes the outputs by {change:.2g}")
        for region in regions:
            ends = [*((n, True) for n in region.srcs), *((n, False) for n in region.sinks)]
            for tensor, axis in (self.place(model, region, name, is_source=side) for name, side in ends):
                if axis is not None and torch.allclose(result.params[tensor], before[tensor], rtol=1e-9, atol=0):
                    raise Failed(f"rg.gauge leaves {tensor} as it is")


def _first(outputs: Any) -> Tensor:
    return next(one.detach() for one in torch.utils._pytree.tree_leaves(outputs) if isinstance(one, Tensor))


def _untrained(function: Any, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    more = {"image_size": 64} if function.__name__.startswith("vit") else {}
    if function.__name__ in ("googlenet", "inception_v3"):
        more["init_weights"] = False
    return function(**kwargs, **more)


def _pytest(arguments: list[str], plugin: Any) -> int:
    import pytest  # from the peer's packages

    settings = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "ignore"]
    root = f"--rootdir={Path(arguments[0].partition('::')[0]).parents[3]}"
    return int(pytest.main([*arguments, *settings, root, "--import-mode=importlib"], plugins=[plugin]))


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
