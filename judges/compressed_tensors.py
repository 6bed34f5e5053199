"""compressed-tensors' tests of rotations on regauge.

    PEERS=FOLDER .venv/bin/python judges/compressed_tensors.py [PIECE-OF-A-NAME ...]

Its tests of whole models run as they are, in float64, on its own modules; what they rotate is watched. A case passes if

1. `rg.gauge` with Hadamard and with random rotations moves weights of the same module, and its outputs stay within 1e-9
   (those of the tests within 1e-5);
2. where the peer fuses all of its matrices into weights, its network is on the orbit of the module, to 1e-9
   (`orbit_distance`).

Tests of a single layer also change its inputs and outputs. There the matrices of inputs and outputs are layers before
and after it, and the network of three layers is compared with the one whose outer layers are identities. Tests that
need a GPU are not run.
"""

import copy
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from judge import Case, Failed, NotRun, Peer, judge, sentence
from torch import nn

import regauge as rg

PEER = Peer(
    "compressed-tensors",
    "https://github.com/neuralmagic/compressed-tensors",
    "52792be02ec09e59f3517104e755a02d0e003fbb",
    ("loguru==0.7.3", "frozendict==2.4.6"),
    ("pytest", "pydantic", "transformers"),
)
SUITE = "tests/test_transform/factory/test_correctness.py"
TESTS = (
    "test_correctness_linear", "test_correctness_embedding", "test_correctness_model",
    "test_correctness_attention_heads", "test_correctness_query_key_locations",
)  # fmt: skip
ON_GPU = ("test_correctness_model_offload", "test_random_matrix_device_handling")
EXPLAINED: dict[str, str] = {}
"""Sentences for cases that do not pass."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    os.chdir(checkout)
    version: Any = ModuleType("compressed_tensors.version")  # written when it is built
    version.__version__ = version.version = ""
    sys.modules["compressed_tensors.version"] = version
    torch.set_default_dtype(torch.float64)
    watch = Watch(importlib.import_module("compressed_tensors.transform"))
    _pytest([str(checkout / SUITE), "--collect-only"], watch)
    for name in watch.names:
        yield Case(name, partial(run, checkout / SUITE, name, watch))


def run(suite: Path, name: str, watch: "Watch") -> str | None:
    """Run a test of the peer with the checks."""
    if name.startswith(ON_GPU):
        raise NotRun("the test moves modules to a GPU")
    watch.reason, watch.note, watch.count = None, None, 0
    code = _pytest([f"{suite}::{name}"], watch)
    if code:
        raise Failed(watch.reason or f"pytest ends with {code}")
    if not watch.count:
        raise Failed("nothing was rotated")
    return watch.note


class Watch:
    """A plugin of pytest that checks what the peer rotates."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.names: list[str] = []
        self.count = 0
        self.reason: str | None = None
        self.note: str | None = None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests that are cases, and put the checks into their module."""
        items[:] = [one for one in items if one.originalname in (*TESTS, *ON_GPU)]
        for one in items:
            one.module.apply_transform_config = self.rotate
            one.module.TransformFactory = SimpleNamespace(from_scheme=self.factory)
        self.names = [one.nodeid.partition("::")[2] for one in items]

    def pytest_exception_interact(self, call: Any) -> None:
        """Keep the reason of a failure."""
        error = call.excinfo.value
        self.reason = str(error) if isinstance(error, Failed) else sentence(error)

    def rotate(self, model: nn.Module, config: Any) -> None:
        """Check the rotations of a model, and rotate it as the peer does."""
        model.eval()
        before = copy.deepcopy(model)
        symmetry = self.check(before)
        self.transform.apply_transform_config(model, config)
        places = [place for scheme in config.config_groups.values() for place in scheme.apply]
        if all(str(place.location).startswith("weight") for place in places):
            self.compare(before, model, symmetry)
        else:
            self.note = "the peer adds operations on activations: its network has no other weights to compare"

    def factory(self, scheme: Any, **kwargs: Any) -> Any:
        """A factory of the peer whose matrices for one layer are checked when all four are made."""
        made: dict[str, nn.Module] = {}
        scheme = scheme.model_copy(update={"precision": torch.float64})
        factory = self.transform.TransformFactory.from_scheme(scheme, **kwargs)
        create = factory.create_transform

        def created(layer: nn.Linear, place: Any) -> Any:
            found = made[str(place.location)] = create(layer, place)
            if len(made) == 4:
                self.sandwich(layer, made)
            return found

        factory.create_transform = created
        return factory

    def sandwich(self, layer: nn.Linear, made: Mapping[str, nn.Module]) -> None:
        """Compare a layer between identities with what the peer makes of it between its matrices."""
        into, out = torch.eye(layer.in_features), torch.eye(layer.out_features)
        with torch.no_grad():
            moved = made["weight_output"](made["weight_input"](layer.weight))
            before = _layers(into, layer.weight, out)
            after = _layers(made["input"](into).T, moved, made["output"](out).T)
        self.compare(before, after, self.check(before))

    def check(self, model: nn.Module) -> rg.Symmetry:
        """Rotate a model by `rg.gauge`, and raise `Failed` unless weights change and outputs stay."""
        self.count += 1
        inputs = _inputs(model)
        params = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        symmetry = rg.discover(model, (inputs,))
        first = model(inputs).detach()
        for method in (rg.gauging.Hadamard(is_kept_always=True), rg.gauging.RandomRotation(is_kept_always=True)):
            generator = torch.Generator().manual_seed(0)
            moved = rg.gauge(params, symmetry, method=method, generator=generator).params
            if all(torch.equal(moved[name], params[name]) for name in params):
                raise Failed(f"{method} rotates nothing")
            second = torch.func.functional_call(model, moved, (inputs,)).detach()
            if not (far := float((second - first).abs().max() / first.abs().max())) <= 1e-9:
                raise Failed(f"{method} changes the outputs by {far:.2g}")
        return symmetry

    def compare(self, before: nn.Module, after: nn.Module, symmetry: rg.Symmetry) -> None:
        """Raise `Failed` unless the network of the peer is on the orbit of the model."""
        params, moved = (
            {name: tensor.detach().clone() for name, tensor in one.state_dict().items()} for one in (before, after)
        )
        size = float(sum(tensor.square().sum() for tensor in params.values())) ** 0.5
        far = rg.canonical.orbit_distance(params, {name: moved[name] for name in params}, symmetry) / size
        if not far <= 1e-9:
            raise Failed(f"its network is {far:.2g} of its length off the orbit")


def _layers(*weights: torch.Tensor) -> nn.Module:
    """Linear layers with these weights, one after the other."""
    model = nn.Sequential(*(nn.Linear(*weight.shape[::-1], bias=False) for weight in weights)).eval()
    model.load_state_dict({f"{k}.weight": weight for k, weight in enumerate(weights)})
    return model


def _inputs(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    layers = [one for one in model.modules() if isinstance(one, nn.Linear | nn.Embedding)]
    if isinstance(layers[0], nn.Embedding):
        return torch.randint(layers[0].num_embeddings, (3, 5), generator=generator)
    return torch.rand(3, 5, layers[0].in_features, generator=generator)


def _pytest(arguments: list[str], plugin: Any) -> int:
    import pytest

    settings = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "ignore"]
    root = f"--rootdir={Path(arguments[0].partition('::')[0]).parents[3]}"
    return int(pytest.main([*arguments, *settings, root], plugins=[plugin]))


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
