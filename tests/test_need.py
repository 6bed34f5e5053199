"""Fine-tunes of one base are merged as stored, and networks in other coordinates are aligned. The report states whether
networks are aligned.
"""

import re
from pathlib import Path

import pytest
import torch
from symmetries import generator

import regauge as rg
from regauge import Params, Symmetry
from regauge.checkpoints.writing import save
from regauge.merging import RULES, Rule
from regauge.merging.blend import Blend
from regauge.merging.merge_record import CLOSER, EXPLAINED, SHARE, Need
from regauge.nets.transformer import GPT, initialize_transformer

UNITS = {"w": (16, 9), "b": (16,), "v": (12, 16), "c": (12,), "u": (5, 12)}
UNIT_AXES = {"w": ("h", None), "b": ("h",), "v": ("k", "h"), "c": ("k",), "u": (None, "k")}
"""The axes of two hidden layers."""
PRODUCTS = {"q": (4, 30), "k": (30, 4), "v": (5, 30), "o": (30, 5)}
PRODUCT_AXES = {"q": ("h", None), "k": (None, "h"), "v": ("k", None), "o": (None, "k")}
"""The axes of two low-rank products of matrices, as in attention."""
KINDS = ("permutation", "signed", "scaled", "orthogonal", "linear")
NOTHING = r"one base, \d+% of the weights are explained: aligning changes nothing"
HELPS = (
    r"aligning helps (the other network|\d of \d networks): \d+% of the weights are explained as stored, "
    r"\d+% after alignment"
)
RULE_NAMES = ("average", "slerp", "task-arithmetic", "ties", "dare", "della", "model-stock")


def has_products(kind: str) -> bool:
    return kind in ("orthogonal", "linear")


def symmetry_of(kind: str) -> Symmetry:
    return Symmetry.from_axes(PRODUCT_AXES if has_products(kind) else UNIT_AXES, kinds={"h": kind, "k": kind})


def network(seed: int, kind: str = "permutation") -> Params:
    chance, shapes = generator(seed), PRODUCTS if has_products(kind) else UNITS
    return {name: torch.randn(shape, generator=chance, dtype=torch.float64) for name, shape in shapes.items()}


def tuned(base: Params, seed: int, length: float) -> Params:
    """Return a network at a given distance from the base, as a share of its norm."""
    chance = generator(seed)
    return {n: t + length * torch.randn(t.shape, generator=chance, dtype=torch.float64) for n, t in base.items()}


def equal(a: Params, b: Params) -> bool:
    return all(torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULE_NAMES)
@pytest.mark.parametrize("length", [0.01, 0.3])
def test_fine_tunes_are_merged_as_they_are_stored(kind: str, name: str, length: float) -> None:
    """The result equals the merge without alignment bit by bit."""
    rule: Rule = RULES[name].build()
    base = network(0, kind)
    networks = [tuned(base, seed, length) for seed in (1, 2)]
    anchor = base if rule.base == "needed" else None
    found = rg.merge(networks, symmetry_of(kind), rule=rule, base=anchor, generator=generator(3))
    seed = int(torch.randint(2**62, (1,), generator=generator(3))) if rule.is_random else None
    as_stored = Blend(rule, found.symmetry, tuple(networks), anchor, seed=seed).params
    assert [name for name, tensor in found.params.items() if not torch.equal(tensor, as_stored[name])] == []
    assert all(equal(found.symmetry.act(g, one), one) for g, one in zip(found.elements, networks, strict=True))
    record = found.record
    (note,) = record.notes
    assert re.fullmatch(NOTHING, note)
    assert note in record.card
    assert record.before == record.after
    assert record.objective == record.initial
    assert record.alignment == "none"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0.0, 0.01, 0.3])
def test_fine_tunes_in_other_coordinates_are_aligned(kind: str, length: float) -> None:
    """The negative test: if one of the networks is moved along its orbit, the networks are aligned before merging."""
    base = network(0, kind)
    symmetry = symmetry_of(kind).bind(base)
    one, two = tuned(base, 1, length), tuned(base, 2, length)
    moved = symmetry.act(symmetry.random(generator(4)), two)
    found = rg.merge([one, moved], symmetry)
    assert any(re.fullmatch(HELPS, note) for note in found.record.notes)
    assert found.record.after[1] < found.record.before[1]
    many = rg.align_many([one, moved], symmetry).params
    assert all(torch.allclose(t, (many[0][n] + many[1][n]) / 2, atol=1e-12) for n, t in found.params.items())
    assert found.record.alignment != "none"


@pytest.mark.parametrize("kind", ["permutation", "signed"])
def test_few_units_in_another_place_are_enough(kind: str) -> None:
    """A long fine-tune with two of sixteen units exchanged is aligned, for any other shares."""
    base = network(0)
    one, two = tuned(base, 1, 0.6), tuned(base, 2, 0.6)
    order = torch.tensor([1, 0, *range(2, 16)])
    swapped = {**two, "w": two["w"][order], "b": two["b"][order], "v": two["v"][:, order]}
    symmetry = symmetry_of(kind)
    found, expected = rg.merge([one, swapped], symmetry), rg.merge([one, two], symmetry)
    assert re.fullmatch(NOTHING, expected.record.notes[0])
    assert re.fullmatch(HELPS, found.record.notes[0])
    assert all(torch.allclose(tensor, expected.params[name]) for name, tensor in found.params.items())


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_are_aligned(kind: str) -> None:
    networks = [network(seed, kind) for seed in (0, 1, 2)]
    found = rg.merge(networks, symmetry_of(kind))
    assert found.record.notes[0].startswith("aligning helps 2 of 2 networks: ")
    many = rg.align_many(networks, symmetry_of(kind)).params
    assert all(torch.allclose(t, torch.stack([one[n] for one in many]).mean(0)) for n, t in found.params.items())


def test_only_those_that_need_it_are_moved() -> None:
    base = network(0)
    symmetry = symmetry_of("permutation").bind(base)
    one, two = tuned(base, 1, 0.1), tuned(base, 2, 0.1)
    moved = symmetry.act(symmetry.random(generator(4)), two)
    found = rg.merge([one, moved], symmetry, base=base, rule=RULES["ties"].build())
    assert found.record.notes[0].startswith("aligning helps 1 of 2 networks: ")
    assert equal(symmetry.act(found.elements[0], one), one)
    assert all(torch.allclose(t, two[n]) for n, t in symmetry.act(found.elements[1], moved).items())
    assert found.record.before[0] == found.record.after[0]
    assert found.record.before[1] > found.record.after[1]


@pytest.mark.parametrize(
    ("values", "is_there"),
    [
        ({}, False),
        ({"worst": SHARE}, False),
        ({"worst": SHARE, "after": 0.99}, True),
        ({"worst": SHARE, "after": 1.2, "aligned": 0.91}, True),
        ({"worst": 1.0, "after": 1.2, "aligned": 0.89}, False),
        ({"worst": SHARE - 0.01, "after": 0.99}, False),
        ({"after": CLOSER - 0.01}, True),
        ({"after": 1.2}, False),
        ({"before": 0.0, "after": 0.0}, False),
        ({"stored": EXPLAINED * 0.9 - 0.01}, True),
        ({"stored": 0.0, "aligned": 0.0}, False),
        ({"stored": None, "aligned": None}, False),
        ({"is_carried": True}, True),
    ],
)
def test_each_piece_of_evidence_is_enough(values: dict[str, float], is_there: bool) -> None:
    plain = {"worst": 0.0, "before": 1.0, "after": 1.0, "stored": 0.9, "aligned": 0.9, "is_carried": False}
    assert Need(moved=0, units=10, **(plain | values)).is_there is is_there  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_nothing_is_said_to_help_that_does_not(noise: float) -> None:
    """Noise makes units of narrow networks indistinguishable. The units stay in place, or explain more at their new
    positions.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
    symmetry, confused = rg.discover(model, (torch.randn(2, 4, dtype=torch.float64),)), 0
    for seed in range(12):
        chance = generator(seed)
        base = {n: 0.3 * torch.randn(t.shape, generator=chance).double() for n, t in model.state_dict().items()}
        other = tuned(base, 100 + seed, noise)
        found = rg.align(base, other, symmetry)
        need = Need.of(found.symmetry, found.element, base, other, found.params)
        confused += need.worst >= SHARE
        told = rg.merge([base, other], symmetry, method=rg.WeightMatching()).record
        assert need.stored is not None
        assert need.aligned is not None
        is_better = need.after < need.before or need.aligned > need.stored
        assert told.notes[0].startswith("aligning helps") == need.is_there
        assert is_better or not need.is_there
        assert told.before == told.after or is_better
    assert noise < 0.2 or confused


def test_what_is_asked_for_is_done() -> None:
    """Requested rotations, and alignments that data selected, are applied, and no message calls them unnecessary."""
    base = network(0)
    one, two = tuned(base, 1, 0.1), tuned(base, 2, 0.1)
    model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.ReLU(), torch.nn.Linear(16, 12))
    names = {"0.weight": "w", "0.bias": "b", "2.weight": "v", "2.bias": "c"}
    pair = [{long: params[short].float() for long, short in names.items()} for params in (one, two)]
    inputs = torch.randn(40, 9, generator=generator(5))
    task = rg.Task(model, [(inputs, inputs.argmax(1))])
    found = rg.merge(pair, rg.discover(model, (inputs[:2],)), task=task)
    assert found.record.alignment.startswith("DataMatching(")
    assert not any("changes nothing" in note for note in found.record.notes)
    always = rg.merge([one, two], symmetry_of("permutation"), rotate="always")
    assert not any("changes nothing" in note for note in always.record.notes)


def test_masks_are_carried_whatever_the_weights_say() -> None:
    """Networks whose masks have different positions cannot be merged as stored, even if their weights are close."""
    model = Masked()
    symmetry = rg.discover(model, (torch.randn(2, 9),))
    one = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    order = torch.arange(32)
    order[[0, 31]] = order[[31, 0]]
    two = {n: t[order] if t.ndim and len(t) == 32 else t[:, order] for n, t in one.items() if n != "last.bias"}
    two["last.bias"] = one["last.bias"]
    found = rg.merge([one, two], symmetry)
    assert found.record.notes[0].startswith("aligning helps")
    assert all(torch.allclose(tensor, one[name]) for name, tensor in found.params.items())


class Masked(torch.nn.Module):
    """Hidden units, of which the first half is masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(9, 32), torch.nn.Linear(32, 5)
        self.register_buffer("mask", (torch.arange(32) < 16).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)) * self.mask)


@pytest.mark.usefixtures("streamed")
def test_transformers_are_told_apart_in_memory_and_streamed(tmp_path: Path) -> None:
    """The two ways give the same result bit by bit, and the same sentence."""
    model = GPT(20, 8, width=16, layers=1, heads=2).eval()
    symmetry = rg.discover(model, (torch.zeros(2, 8, dtype=torch.int64),))
    base, stranger = (initialize_transformer(model, generator(seed)) for seed in (0, 1))
    chance = generator(2)
    near = {n: t + 0.2 * t.std() * torch.randn(t.shape, generator=chance) for n, t in base.items() if t.numel() > 1}
    paths = {name: save(one, tmp_path / f"{name}.safetensors") for name, one in
             (("base", base), ("near", near), ("stranger", stranger))}  # fmt: skip
    for other, pattern in (("near", NOTHING), ("stranger", HELPS)):
        networks = {"near": near, "stranger": stranger}[other]
        ways = {"rule": RULES["task-arithmetic"].build()}
        whole = rg.merge([networks], symmetry, base=base, **ways)
        out = tmp_path / f"{other} out.safetensors"
        found = rg.merge([paths[other]], symmetry, base=paths["base"], out=out, memory="150MB", **ways)
        assert "streamed" in found.record.alignment
        assert re.fullmatch(pattern, found.record.notes[0])
        assert found.record.notes[0] == whole.record.notes[0]
        assert found.record.before == pytest.approx(whole.record.before)
        if other == "near":
            assert equal(dict(found.params), whole.params)
            assert "none, streamed" in found.record.card
