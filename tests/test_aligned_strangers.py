"""Independent networks that were aligned are never called descendants; relatives are still recognized, and provenance
is read.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from symmetries import generator
from torch import Tensor, nn
from torch.func import functional_call

import regauge as rg
from regauge import Params
from regauge.alignment import Method
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.comparison import compare_many
from regauge.comparison.averages import find_averages
from regauge.comparison.verdicts import ALIGNED
from regauge.data.images import digits

SEEDS = (0, 1, 2)
STRANGER = ("unrelated", "undecided", ALIGNED)
VERDICTS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("as trained", ("unrelated",)),
    ("weight matching", STRANGER),
    ("activation matching", STRANGER),
    ("Sinkhorn", STRANGER),
    ("aligned in part", STRANGER),
    ("aligned, trained on", STRANGER),
    ("aligned, pruned", STRANGER),
    ("two aligned, averaged", STRANGER),
    ("copy", ("identical",)),
    ("copy, moved", ("same network in another gauge",)),
    ("fine-tuned", ("descended",)),
    ("fine-tuned, moved", ("descended",)),
    ("fine-tuned, aligned", ("descended",)),
    ("pruned", ("descended",)),
    ("rounded", ("identical",)),
    ("rounded coarsely", ("descended",)),
    ("averaged with its fine-tune", ("descended",)),
    ("averaged with a stranger", ("descended",)),
)
"""The kind of the second network of a pair, and the correct verdicts."""


class Population:
    """Small networks on digits with separate initializations, and networks derived from them."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))
        images = digits()
        self.inputs, self.targets = images.train_images.flatten(1), images.train_labels
        self.symmetry = rg.discover(self.module, (self.inputs[:2],))
        self.networks = [self.train(self.start(seed), seed, 250) for seed in SEEDS]
        self.task = rg.Task(self.module, [(self.inputs[:200], self.targets[:200])])

    def start(self, seed: int) -> Params:
        torch.manual_seed(seed)
        for layer in self.module:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def train(self, start: Params, seed: int, steps: int) -> Params:
        params = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        optimizer, source = torch.optim.Adam(params.values(), lr=3e-3), generator(seed)
        for _ in range(steps):
            rows = torch.randint(len(self.inputs), (64,), generator=source)
            outputs = functional_call(self.module, params, (self.inputs[rows],))
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, self.targets[rows]).backward()
            optimizer.step()
        return {name: tensor.detach() for name, tensor in params.items()}

    def align(self, a: Params, b: Params, method: Method | None = None) -> Params:
        task = None if method is None else self.task
        return rg.align(a, b, self.symmetry, method=method, task=task, generator=generator(0)).params

    def made(self, kind: str, one: int) -> Params:
        """Return the second network of a pair, by the way in which it is made."""
        a, b, c = (self.networks[(one + k) % len(SEEDS)] for k in range(3))
        made: dict[str, Callable[[], Params]] = {
            "as trained": lambda: b,
            "weight matching": lambda: self.align(a, b),
            "activation matching": lambda: self.align(a, b, rg.ActivationMatching()),
            "Sinkhorn": lambda: self.align(a, b, rg.Sinkhorn(steps=20)),
            "aligned in part": lambda: self.partly(a, b),
            "aligned, trained on": lambda: self.train(self.align(a, b), 7, 60),
            "aligned, pruned": lambda: pruned(self.align(a, b), 0.4),
            "two aligned, averaged": lambda: mean(self.align(a, b), self.align(a, c)),
            "copy": lambda: a,
            "copy, moved": lambda: self.moved(a),
            "fine-tuned": lambda: self.train(a, 7, 100),
            "fine-tuned, moved": lambda: self.moved(self.train(a, 7, 100)),
            "fine-tuned, aligned": lambda: self.align(a, self.moved(self.train(a, 7, 100))),
            "pruned": lambda: pruned(a, 0.6),
            "rounded": lambda: {name: tensor.bfloat16() for name, tensor in a.items()},
            "rounded coarsely": lambda: {n: (t * 16).round() / 16 for n, t in a.items()},
            "averaged with its fine-tune": lambda: mean(a, self.train(a, 7, 100)),
            "averaged with a stranger": lambda: mean(a, self.align(a, b)),
        }
        return made[kind]()

    def partly(self, a: Params, b: Params) -> Params:
        """Return B with one of two hidden layers in A's order."""
        found = rg.align(a, b, self.symmetry)
        last = found.symmetry.groups[-1].name
        return found.symmetry.act(found.element.replace(last, found.symmetry.identity()[last]), b)

    def moved(self, params: Params) -> Params:
        return self.symmetry.act(self.symmetry.random(generator(3)), params)


def mean(a: Params, b: Params) -> Params:
    return {name: (tensor + b[name]) / 2 for name, tensor in a.items()}


def pruned(params: Params, share: float) -> Params:
    return {
        n: torch.where(t.abs() > t.abs().flatten().quantile(share), t, 0.0) if t.ndim > 1 else t
        for n, t in params.items()
    }


@pytest.fixture(scope="module")
def population() -> Population:
    return Population()


@pytest.mark.parametrize(("kind", "allowed"), VERDICTS, ids=[kind for kind, _ in VERDICTS])
def test_verdicts(population: Population, kind: str, allowed: tuple[str, ...]) -> None:
    for one in range(len(SEEDS)):
        found = rg.compare(population.networks[one], population.made(kind, one), population.symmetry)
        assert found.verdict in allowed, (found.reason, found.numbers)


def test_order_alone_accuses_nobody(population: Population) -> None:
    """The order of an aligned stranger is beyond chance, and the sentence states what this may mean."""
    found = rg.compare(population.networks[0], population.made("two aligned, averaged", 0), population.symmetry)
    assert found.z_score is not None
    assert found.z_score > 6
    assert found.p_value == 0.001
    assert found.verdict == ALIGNED
    assert "one was aligned to the other, or they have a common ancestor" in found.reason
    moved = rg.compare(population.networks[0], population.made("copy, moved", 0), population.symmetry)
    assert any("it says nothing about a copy with another order" in note for note in moved.notes)


# --- provenance ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(population: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("symmetry.json").write_text(population.symmetry.to_json())
    for name, params in zip("abc", population.networks, strict=True):
        save(params, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_an_alignment_that_is_named_is_undone(population: Population, folder: Path) -> None:
    symmetry = population.symmetry
    rg.align("a.safetensors", "b.safetensors", symmetry, out="near.safetensors")
    known = rg.compare("a.safetensors", "b.safetensors", symmetry)
    found = rg.compare("a.safetensors", "near.safetensors", symmetry)
    assert found.p_value == known.p_value  # Of the order before.
    assert found.z_score == pytest.approx(known.z_score, abs=1e-4)
    assert found.verdict == "unrelated"
    assert "its element is stored with it" in found.notes[0]
    assert "'b.safetensors'" in found.notes[0]
    Path("near.alignment.safetensors").rename("away.safetensors")
    told = rg.compare("a.safetensors", "near.safetensors", symmetry)
    assert told.p_value == 0.001
    assert told.verdict == "unrelated"
    assert "the verdict does not use them" in told.notes[0]
    save(load("near.safetensors"), folder / "bare.safetensors")  # Nothing says where it comes from.
    assert rg.compare("a.safetensors", "bare.safetensors", symmetry).verdict in STRANGER


@pytest.mark.usefixtures("folder")
def test_a_parent_that_is_named_is_one(population: Population, capsys: pytest.CaptureFixture[str]) -> None:
    symmetry, files = population.symmetry, [f"{name}.safetensors" for name in "abc"]
    rg.merge(files, symmetry, weights=[0.5, 0.3, 0.2], out="merged.safetensors")
    found = rg.compare("c.safetensors", "merged.safetensors", symmetry)
    assert found.verdict == "descended"
    assert any("`regauge merge` wrote it, of 'a.safetensors'" in note for note in found.notes)
    main(["compare", *files, "merged.safetensors", "--symmetry", "symmetry.json", "--draws", "99", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["families"] == [[*files, "merged.safetensors"]]
    (average,) = told["averages"]
    assert average["child"] == "merged.safetensors"
    assert average["parents"] == files
    assert average["is_told"]
    assert average["weights"] == pytest.approx([0.5, 0.3, 0.2], abs=0.08)
    assert told["trees"] == []  # Strangers have no tree, and their average is no ancestor of theirs.


# --- averages -----------------------------------------------------------------------------------------------------


def test_an_average_is_no_ancestor(population: Population) -> None:
    base, networks = population.networks[0], dict[str, Params]()
    children = [population.train(base, seed, 60) for seed in (11, 12, 13)]
    networks |= {"base": base, **{f"child {k}": child for k, child in enumerate(children)}}
    networks["average"] = mean(children[0], children[1])
    found = compare_many(list(networks), lambda a, b: rg.compare(networks[a], networks[b], population.symmetry))
    assert found.families == (tuple(networks),)
    (average,) = found.averages
    assert average.child == "average"
    assert average.parents == ("child 0", "child 1")
    assert not average.is_told
    (tree,) = found.trees
    assert "average" not in {name for branch in tree for name in (branch.parent, branch.child)}


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.2, 0.8), (0.5, 0.3, 0.2), (0.25,) * 4])
def test_averages_of_points_are_found_and_ancestors_are_not(weights: tuple[float, ...]) -> None:
    points = torch.randn(5, 400, generator=generator(0), dtype=torch.float64)
    points[0] = 0  # The others are its children: independent steps.
    average = (torch.tensor(weights, dtype=torch.float64).unsqueeze(1) * points[1 : 1 + len(weights)]).sum(0)
    every = torch.cat([points, average[None]])
    names = [f"n{k}" for k in range(6)]
    squares = torch.cdist(every, every).square()
    (found,) = find_averages(names, squares, names, {})
    assert found.child == "n5"
    assert found.parents == tuple(names[1 : 1 + len(weights)])
    assert found.weights == pytest.approx(weights, abs=1e-3)
    assert find_averages(names[:5], squares[:5, :5], names[:5], {}) == ()
    unknown = torch.full_like(squares, torch.nan).fill_diagonal_(0)
    assert find_averages(names, unknown, names, {}) == ()
    (told,) = find_averages(names, unknown, names, {"n5": ("n1", "n2")})
    assert told.weights == (0.5, 0.5)


def test_a_population_has_what_it_needs(population: Population) -> None:
    """The networks have learned their task, so that strangers are hard negatives."""
    accuracy: Tensor = torch.stack(
        [
            (functional_call(population.module, one, (population.inputs,)).argmax(1) == population.targets)
            .double()
            .mean()
            for one in population.networks
        ]
    )
    assert float(accuracy.min()) > 0.9
