"""rebasin's permutations and its coordinate descent on regauge.

    PEERS=FOLDER .venv/bin/python judges/rebasin.py [PIECE-OF-A-NAME ...]

A case passes if

- model: each permutation that the peer's `PermutationInitializer` leaves free on a model of its list is a group of
  regauge that reorders exactly its axes, or it changes the outputs (two of these are tried in float64). Running
  statistics are not moved by the peer but computed anew;
- test: its own test passes with `rg.align` in the place of `PermutationCoordinateDescent`, the function in float64
  stays within 1e-9, and the inner product is at least that which the peer reaches, but for 1 in 1,000; both have the
  peer's permutations. Both end in local optima: of three climbs each (three orders of its steps, three starts of
  regauge) the best counts. `test_merge_many_large_mlp` is the same as `test_merge_many`, in large.
"""

import copy
import importlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from judge import Case, Failed, NotRun, Peer, declare_torchvision, judge
from specifications import Specification, effect, judged, short, unlike
from torch import nn

import regauge as rg

PEER = Peer(
    "rebasin",
    "https://github.com/snimu/rebasin",
    "fca868b34fe8904afad07caff8baaadeee866ab8",
    ("torchview==0.2.7", "torchvision==0.29.1", "pillow==13.0.0"),
    ("graphviz", "tqdm", "scipy", "pytest"),
)
TRIED = 2
"""Permutations of a model whose effect is measured, of those that are no groups of regauge."""
EXPLAINED: dict[str, str] = {}
"""Sentences for cases that do not pass."""
CLIMBS = 3
"""Climbs of each."""
NOT_HERE = {
    "TestPermutationCoordinateDescent.test_vit_b_16": "the test downloads two networks of 86 million parameters",
    "TestPCDOnGPU.test_mlp": "the test moves models to a GPU",
}
DESCENT = "tests.test_permutation_coordinate_descent"
TESTS = {
    DESCENT: ("test_long_mlp", "TestPermutationCoordinateDescent.test_resnet18",
              "TestPermutationCoordinateDescent.test_mlp", "TestPermutationCoordinateDescent.test_enforce_identity",
              "TestPermutationCoordinateDescent.test_vit_b_16", "TestPCDOnGPU.test_mlp"),
    "tests.test_merge_many": ("test_merge_many__get_mean_model", "test_merge_many"),
}  # fmt: skip


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    declare_torchvision()
    sys.path.insert(0, str(checkout))
    fixtures = importlib.import_module("tests.fixtures.mandw")
    initializer = importlib.import_module("rebasin.permutation_initializer")
    for one in fixtures.MODELS_AND_WEIGHTS:
        yield Case(f"model: {one.constructor.__name__}", partial(compare_model, initializer, one.constructor))
    for module, names in TESTS.items():
        for name in names:
            yield Case(f"test: {module.rpartition('.')[2]}.py::{name}", partial(run_test, module, name))


def compare_model(initializer: Any, make: Any) -> str | None:
    """Compare the permutations that are free with the groups of regauge."""
    pixels = 224 if make.__name__.startswith("vit") else 64
    with torch.device("meta"):
        model = make().eval()
        inputs = torch.zeros(1, 3, pixels, pixels)
    with mock.patch.object(initializer, "draw_graph", partial(initializer.draw_graph, device="meta")):
        found = initializer.PermutationInitializer(model, model, inputs)
    found.model_graph.enforce_identity()
    spec = specification(found, model)
    if not spec.axes:
        raise Failed("the peer leaves no permutation free")
    names = {name for name, _ in model.named_parameters()}
    others, notes = unlike(model, inputs, spec, lambda name: name not in names)
    if others:
        model, inputs = make().eval(), torch.zeros(inputs.shape)
        changes = {perm: effect(model, inputs, axes) for perm, (axes, _) in list(others.items())[:TRIED]}
        least = min(changes, key=lambda perm: changes[perm])
        axes, near = others[least]
        text = f"{least} moves {short(axes - near)} and not {short(near - axes)}, unlike regauge"
        if changes[least] <= 1e-9:
            raise Failed(f"{text}, and changes the outputs by {changes[least]:.2g} only")
        notes.append(f"{len(others)} of its permutations are no groups of regauge; those tried change the outputs")
    return "; ".join(notes) or None


def specification(found: Any, model: nn.Module) -> Specification:
    """The permutations that the peer leaves free."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return Specification({
        f"permutation {k}": tuple(dict.fromkeys((names[id(one.parameter_b)], one.axis) for one in infos))
        for k, (perm, infos) in enumerate(found.model_graph.permutation_to_info)
        if len(perm) > 1
    })  # fmt: skip


class Aligned:
    """`rg.align` in the place of the peer's coordinate descent."""

    peer: Any

    def __init__(
        self, model_a: nn.Module, model_b: nn.Module, input_data_b: Any, input_data_a: Any = None, **_: Any
    ) -> None:
        self.model_a, self.model_b, self.inputs = model_a, model_b, input_data_b
        self.theirs = self.peer(copy.deepcopy(model_a), copy.deepcopy(model_b), input_data_b)
        self.pinit = self.theirs.pinit
        self.params: dict[str, torch.Tensor] = {}

    def rebasin(self, max_iterations: int = 100) -> None:
        """Find the permutations and apply them."""
        self.calculate_permutations(max_iterations)
        self.apply_permutations()

    def calculate_permutations(self, max_iterations: int = 100) -> None:
        """Find the permutations by both."""
        state_a, state_b = (
            {n: t.detach().clone() for n, t in one.state_dict().items()} for one in (self.model_a, self.model_b)
        )
        model = copy.deepcopy(self.model_b).eval()
        symmetry = specification(self.pinit, self.theirs.model_b).symmetry(state_a)
        method, generator = rg.WeightMatching(restarts=CLIMBS - 1), torch.Generator().manual_seed(0)
        result = rg.align(state_a, state_b, symmetry, method=method, generator=generator)
        wide = {n: t.double() if t.is_floating_point() else t for n, t in state_b.items()}
        before, after = (
            torch.func.functional_call(model.double(), one, (self.inputs.double(),))
            for one in (wide, symmetry.act(result.element, wide))
        )
        far = float((before - after).abs().max() / before.abs().max())
        if not far <= 1e-9:
            raise Failed(f"the function changes by {far:.2g}")
        self.params = dict(result.params)
        names = [name for name, _ in model.named_parameters()]
        first, ours, *theirs = (
            sum(float((state_a[name] * one[name]).sum()) for name in names)
            for one in (state_b, self.params, *self.descend(max_iterations))
        )
        judged(first, max(theirs), ours, None)

    def descend(self, max_iterations: int) -> Iterator[dict[str, Any]]:
        """Yield the parameters that the peer reaches, once for each order."""
        for _ in range(CLIMBS):
            other = self.peer(copy.deepcopy(self.model_a), copy.deepcopy(self.model_b), self.inputs)
            other.rebasin(max_iterations)
            yield dict(other.model_b.named_parameters())

    def apply_permutations(self) -> None:
        """Move the model."""
        self.model_b.load_state_dict(self.params)


def run_test(module: str, name: str) -> str | None:
    """Run a test in which regauge matches."""
    if name in NOT_HERE:
        raise NotRun(NOT_HERE[name])
    tests = importlib.import_module(module)
    many = importlib.import_module("rebasin.merge_many")
    kept = many.PermutationCoordinateDescent
    Aligned.peer = kept
    torch.manual_seed(0)
    owners = [one for one in (tests, many) if hasattr(one, "PermutationCoordinateDescent")]
    for one in owners:
        one.PermutationCoordinateDescent = Aligned
    target: Any = tests
    try:
        for piece in name.split("."):
            target = getattr(target() if isinstance(target, type) else target, piece)
        target()
    finally:
        for one in owners:
            one.PermutationCoordinateDescent = kept
    return None


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
