"""Comparisons of networks with different widths: compared units, verdicts, chance, and omitted parts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from symmetries import BY_HAND, drawn, generator, linear_heads, mlp_symmetry
from torch import Tensor, nn

import regauge as rg
from regauge import Params, Symmetry
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.comparison.common import count_units
from regauge.pruning import cut_params, cut_symmetry
from regauge.pruning.extension import extend_symmetry, pad_params

WIDE = mlp_symmetry(20, 40, 30, 10, kind="scaled")
FEWER = {"h1": 30, "h2": 18}
SMALL = cut_symmetry(WIDE, FEWER)
HEADS = linear_heads(4, 3)
PRUNED = {
    "permutation": (mlp_symmetry(20, 40, 30, 10), FEWER),
    "scaled": (WIDE, FEWER),
    "dihedral": (mlp_symmetry(20, 40, 30, 10, kind="dihedral"), FEWER),
    "one layer": (WIDE, {"h1": 30}),
    "recurrent": (BY_HAND["recurrent"], {"h": 5}),
    "stream": (BY_HAND["stream"], {"s": 4, "h0": 6, "h1": 5}),
    "attention": (BY_HAND["attention"], {"heads": 2}),
    "linear heads": (HEADS[0].bind({n: torch.zeros(s) for n, s in HEADS[1].items()}), {"heads": 2}),
    "experts": (BY_HAND["experts"], {"e": 2, "i": 3}),
}


def kept(symmetry: Symmetry, sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    """Return some units of each copy of each group."""
    source, units = generator(seed), {}
    for name, size in sizes.items():
        bases = [symmetry[base].size for base in symmetry[name].within]
        units[name] = torch.rand(*bases, symmetry[name].size, generator=source).argsort(-1)[..., :size].sort(-1).values
    return units


def moved(symmetry: Symmetry, params: Params, seed: int) -> Params:
    """Return a network transformed by a random element with scales from 1/64 to 64."""
    element = symmetry.random(generator(seed))
    for name, value in element.items():
        if value.scale is not None:
            element = element.replace(name, replace(value, scale=value.scale**6))
    return symmetry.act(element, params)


def away(params: Params, share: float, seed: int) -> Params:
    """Return a network changed by a share of its size."""
    source = generator(seed)
    noise = {name: torch.randn(t.shape, generator=source, dtype=t.dtype) for name, t in params.items()}
    return {name: t + share * t.square().mean().sqrt() * noise[name] for name, t in params.items()}


@pytest.mark.parametrize("name", PRUNED)
def test_a_moved_copy_without_some_units_is_found(name: str) -> None:
    symmetry, sizes = PRUNED[name]
    params, small, units = drawn(symmetry, 0), cut_symmetry(symmetry, sizes), kept(symmetry, sizes, 1)
    child = moved(small, cut_params(params, symmetry, units), 2)
    values = {n: sum(t.numel() for t in one.values()) for n, one in (("all", params), ("kept", child))}
    for first, second, own, k in ((params, child, symmetry, 0), (child, params, small, 1)):
        found = rg.compare(first, second, own, draws=9)
        assert found.verdict == "descended", str(found)
        assert "in their common part, an element of the group" in found.reason
        assert found.orbit_distance < 1e-6 * found.norm < 0.1 * found.distance
        assert found.compared == pytest.approx(1 if k else values["kept"] / values["all"])
        assert found.units.keys() == sizes.keys()
        for group, pair in found.units.items():
            if not symmetry[group].within:
                assert torch.equal(pair[k], units[group])
                assert torch.equal(pair[1 - k], torch.arange(sizes[group]))
        cut = [
            cut_params(one, s, {n: pair[j] for n, pair in found.units.items()})
            for j, (one, s) in enumerate(((first, own), (second, small if k == 0 else symmetry)))
        ]
        again = found.symmetry.act(found.element, cut[1])
        assert all(torch.allclose(again[n], cut[0][n], atol=1e-5) for n in again)


def test_descendants_of_fewer_units_and_strangers() -> None:
    params = drawn(WIDE, 0)
    narrow = away(cut_params(params, WIDE, kept(WIDE, FEWER, 1)), 0.3, 2)
    stored = rg.compare(params, narrow, WIDE)
    assert stored.verdict == "descended"
    assert "after alignment B explains" in stored.reason
    assert (stored.p_value, stored.z_score) == (None, None)
    assert any(note.startswith("no p-value: ") for note in stored.notes)
    rounded = {name: tensor.bfloat16() for name, tensor in moved(SMALL, narrow, 3).items()}
    for first, second, symmetry in ((params, rounded, WIDE), (rounded, params, SMALL)):
        found = rg.compare(first, second, symmetry)
        assert found.verdict == "descended"
        if first is params:  # Shares are measured where A is on its orbit.
            assert found.share_after == pytest.approx(stored.share_after, abs=0.005)
        other = drawn(SMALL, 5) if first is params else drawn(WIDE, 5)
        assert rg.compare(first, other, symmetry).verdict == "unrelated"
    both = {**FEWER, "h1": 50}  # More units of one group, and fewer of the other one.
    between = extend_symmetry(WIDE, {"h1": 50})
    grown = pad_params(params, between, {"h1": 40})
    grown = {name: torch.where(tensor == 0, drawn(between, 6)[name], tensor) for name, tensor in grown.items()}
    grown = cut_params(grown, between, kept(between, {"h2": 18}, 4))
    found = rg.compare(params, moved(cut_symmetry(between, {"h2": 18}), grown, 5), WIDE)
    assert found.verdict == "descended"
    assert {name: len(units) for name, (units, _) in found.units.items()} == {"h1": 40, "h2": 18}
    assert sorted(both) == sorted(found.units)


def test_choosing_units_is_counted_as_chance() -> None:
    """Some of many units match any network. Therefore strangers also choose their units from the whole network."""
    wide, few = mlp_symmetry(6, 120, 40), mlp_symmetry(6, 8, 40)
    for seed in range(2):
        found = rg.compare(drawn(wide, seed), drawn(few, 9), wide, draws=9)
        assert found.verdict == "unrelated", str(found)
        assert found.share_after is not None
        assert found.share_by_chance is not None
        assert min(found.share_after, found.share_by_chance) > 0.12  # Among units that were chosen before it is 0.07.


def test_the_order_of_units_is_tested_where_both_have_as_many() -> None:
    params = drawn(WIDE, 0)
    child = cut_params(params, WIDE, kept(WIDE, {"h1": 30}, 1))
    found = rg.compare(params, away(child, 0.3, 2), WIDE)
    assert found.tested_groups == ("h2",)
    assert found.p_value == 1 / 1000
    other = rg.compare(params, cut_params(drawn(WIDE, 7), WIDE, kept(WIDE, {"h1": 30}, 1)), WIDE)
    assert other.tested_groups == ("h2",)
    assert other.p_value is not None
    assert other.p_value > 0.001
    known = rg.compare(
        *({n: t for n, t in one.items() if n in ("1.bias", "2.weight")} for one in (params, child)),
        Symmetry.from_axes({"1.bias": ("h2",), "2.weight": (None, "h2")}, kinds={"h2": "scaled"}),
    )
    assert rg.compare(params, child, WIDE).p_value == known.p_value


def test_what_does_not_fit_is_left_out() -> None:
    params = drawn(WIDE, 0)
    child = cut_params(params, WIDE, kept(WIDE, FEWER, 1))
    broken = {**child, "1.weight": child["1.weight"][:, :29]}  # Two axes disagree about the units of h1.
    found = rg.compare(params, broken, WIDE)
    assert found.units.keys() == {"h2"}
    assert {share.name for share in found.shares} == {"1.bias", "2.weight"}
    assert "left out, because its shape differs: '0.weight', (40, 20) in A and (30, 20) in B" in found.notes
    more = {**child, "2.weight": torch.cat([child["2.weight"], child["2.weight"][:3]])}
    found = rg.compare(params, {**more, "3.weight": torch.ones(4, 4)}, WIDE)
    assert found.verdict == "descended"
    assert found.notes[:2] == (
        "'h1': 30 units are compared, all of B and the best matches among the 40 of A",
        "'h2': 18 units are compared, all of B and the best matches among the 30 of A",
    )
    assert "'2.weight': compared are the first 10 along axis 0, where A has 10 and B 13" in found.notes
    assert "left out, because only B has them: '3.weight'" in found.notes
    rotated = mlp_symmetry(20, 40, 10, kind="orthogonal")  # Units that matrices mix are not chosen one by one.
    with pytest.raises(ValueError, match="both must come from the same architecture"):
        rg.compare(drawn(rotated, 0), drawn(mlp_symmetry(20, 30, 10), 0), rotated)


def test_mistakes_are_refused_as_in_networks_of_one_width() -> None:
    params, child = drawn(WIDE, 0), drawn(SMALL, 1)
    broken = {**params, "0.bias": params["0.bias"] / 0}
    with pytest.raises(ValueError, match=r"'0.bias' of the second network holds NaN or Inf in 40 of"):
        rg.compare(child, broken, SMALL)
    with pytest.raises(ValueError, match="only the first has"):
        rg.compare(params, {name: child[name] for name in child if name != "1.bias"}, WIDE)
    with pytest.raises(ValueError, match="quantized weights must be dequantized first"):
        rg.compare({**params, "0.weight": (10 * params["0.weight"]).to(torch.int8)}, child, WIDE)
    with pytest.raises(ValueError, match="both must come from the same architecture"):
        rg.compare(params, {name: tensor[None] for name, tensor in child.items()}, WIDE)
    task = rg.Task(nn.Linear(1, 1), [(torch.zeros(1, 1), torch.zeros(1, 1))])
    with pytest.raises(ValueError, match="both networks with one model, but they differ: 'h1': 30 units"):
        rg.compare(params, child, WIDE, task=task)


def test_references_choose_units_of_their_own() -> None:
    params = drawn(WIDE, 0)
    child = moved(SMALL, away(cut_params(params, WIDE, kept(WIDE, FEWER, 1)), 0.2, 1), 2)
    others = [drawn(SMALL, seed) for seed in range(2, 6)]
    assert rg.compare(params, child, WIDE, references=others, draws=9).reference_p_value == 0.2


def test_a_symmetry_of_other_widths_serves_two_networks_of_the_same() -> None:
    a, noise = drawn(SMALL, 0), drawn(SMALL, 1)
    b = moved(SMALL, {name: tensor + 0.2 * noise[name] for name, tensor in a.items()}, 2)
    found, known = rg.compare(a, b, WIDE), rg.compare(a, b, SMALL)
    assert str(found) == str(known)
    assert found.compared == 1
    assert rg.compare(a, a, WIDE).verdict == "identical"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write a network, and the network without units of one layer and of both layers."""
    params = {name: tensor.float() for name, tensor in drawn(WIDE, 0).items()}
    paths = []
    for k, sizes in enumerate(({}, {"h1": 30}, FEWER)):
        paths.append(tmp_path / f"{k}.safetensors")
        save(cut_params(params, WIDE, kept(WIDE, sizes, 1)), paths[-1])
    return paths


def test_files_are_compared_as_dictionaries_are(files: list[Path]) -> None:
    known = rg.compare(load(files[0]), load(files[2]), WIDE, draws=9)
    assert str(rg.compare(files[0], files[2], WIDE, draws=9)) == str(known)


@pytest.mark.usefixtures("streamed")
def test_units_of_streamed_networks_are_not_matched(files: list[Path]) -> None:
    found = rg.compare(files[0], files[1], WIDE, draws=9, memory="2GB")
    assert {share.name for share in found.shares} == {"1.bias", "2.weight"}
    assert "matching units of networks of different widths needs" in found.notes[-1]
    with pytest.raises(ValueError, match=r"(?s)matching units .* but 2.*GB are allowed; allow more"):
        rg.compare(files[0], files[2], WIDE, draws=9, memory="2GB")


@pytest.mark.parametrize("name", BY_HAND)
def test_longer_axes_are_those_that_are_cut_to_the_given_ones(name: str) -> None:
    symmetry = BY_HAND[name]
    sizes = {group.name: group.size + 2 for group in symmetry.groups if group.is_permuted}
    before = {group: symmetry[group].size for group in sizes}
    longer = extend_symmetry(symmetry, sizes)
    again = cut_symmetry(longer, before)
    assert again.shapes == symmetry.shapes
    for parameter, sites in symmetry.sites.items():
        for one, other in zip(sites, again.sites[parameter], strict=True):
            assert torch.equal(one.positions.sort().values, other.positions.sort().values)
            assert torch.equal(one.units[one.positions.argsort()], other.units[other.positions.argsort()])
    params, element, more = drawn(longer, 0), longer.random(generator(1)), longer.random(generator(2))
    both = longer.act(longer.compose(element, more), params)
    assert all(torch.allclose(t, both[n]) for n, t in longer.act(element, longer.act(more, params)).items())
    small = drawn(symmetry, 3)
    padded, first = pad_params(small, longer, before), {n: torch.arange(size) for n, size in before.items()}
    first = {n: own.expand(*(longer[base].size for base in longer[n].within), -1) for n, own in first.items()}
    cut = cut_params(padded, longer, first) if sizes else padded
    assert all(torch.equal(cut[n], tensor) for n, tensor in small.items())
    assert all(float(padded[n].square().sum()) == pytest.approx(float(t.square().sum())) for n, t in small.items())
    if name != "normalized groups":  # Its axes all have both groups: 4 of 3 units, or 3 of 4.
        assert count_units(longer.shapes, symmetry) == {g.name: longer[g.name].size for g in symmetry.groups}
