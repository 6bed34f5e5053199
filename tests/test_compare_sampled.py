"""Large networks are compared by a sample. If the sample decides, all values give the same verdict, and few values are
read.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import covering
from symmetries import generator
from torch import nn

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.comparison import compare_sampled as _sampled
from regauge.comparison import sample as _sample
from regauge.comparison.sample import Sample, select
from regauge.core.params import Params
from regauge.nets.transformer import GPT, Llama

TOKENS = torch.zeros(2, 4, dtype=torch.long)
NETS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: Llama(700, width=48, layers=6, heads=4, kv_heads=4),
    "GPT": lambda: GPT(700, 16, width=48, layers=6, heads=4),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits such that small networks count as large, with fewer units, layers and values."""
    monkeypatch.setattr(_sampled, "LARGE", 0)
    monkeypatch.setattr(_sampled, "TELLING", 96)
    monkeypatch.setattr(_sample, "UNITS", 32)
    monkeypatch.setattr(_sample, "LAYERS", 4)
    monkeypatch.setattr(_sample, "ENTRIES", 512)


@cache
def net(name: str) -> tuple[rg.Symmetry, Params, Params]:
    """Return a symmetry and two strangers."""
    make = NETS[name]
    symmetry = rg.discover(make().eval(), (TOKENS,), verify=False)
    a, b = (network(make, seed) for seed in (0, 1))
    return symmetry.bind(a), a, b


def network(make: Callable[[], nn.Module], seed: int) -> Params:
    """Return a network far from its initialization."""
    torch.manual_seed(seed)
    state, chance = make().state_dict(), generator(seed)
    return {n: t + (t.std() if t.ndim > 1 else 0.1) * torch.randn(t.shape, generator=chance) for n, t in state.items()}


def away(params: Params, share: float) -> Params:
    """Return a network with noise, given as a share of the size of each matrix."""
    chance = generator(7)
    return {n: t + share * t.std() * torch.randn(t.shape, generator=chance) * (t.ndim > 1) for n, t in params.items()}


def unrotated(symmetry: rg.Symmetry) -> rg.Element:
    """Return an element that does not rotate the stream."""
    return symmetry.random(generator(3), ("permutation", "sign", "scale", "linear"))


RELATIVES: dict[str, tuple[Callable[[rg.Symmetry, Params, Params], Params], bool]] = {
    "identical": (lambda symmetry, a, b: a, False),
    "copy, moved": (lambda symmetry, a, b: symmetry.act(symmetry.random(generator(3)), a), False),
    "child": (lambda symmetry, a, b: away(a, 0.3), True),
    "child, moved": (lambda symmetry, a, b: symmetry.act(unrotated(symmetry), away(a, 0.3)), True),
    "aligned stranger": (lambda symmetry, a, b: rg.align(a, b, symmetry).params, False),
    "child, moved and rotated": (
        lambda symmetry, a, b: symmetry.act(symmetry.random(generator(3)), away(a, 0.3)),
        False,
    ),
    "half of the layers": (
        lambda symmetry, a, b: {n: b[n] if re.search(r"\.[135]\.", n) else t for n, t in away(a, 0.3).items()},
        False,
    ),
}
"""Second networks, and whether a sample must decide about them. A sample decides about a stranger without added
tensors."""
IN_CI = covering(NETS, RELATIVES, part=1, of=2)
"""Every relative with one of the nets, and both nets with some relatives about which a sample decides and some about
which it does not."""


STRANGERS = [pytest.param(one, "stranger", marks=pytest.mark.thorough if one == "GPT" else ()) for one in NETS]
"""For a GPT, a sample decides about no kind of stranger, and all values are compared. In CI, another kind runs."""


@pytest.mark.parametrize(("net_name", "name"), [*IN_CI, *STRANGERS])
def test_a_sample_decides_as_all_values_do(net_name: str, name: str) -> None:
    symmetry, a, b = net(net_name)
    make, is_decided = RELATIVES.get(name, (lambda symmetry, a, b: b, not symmetry.translations))
    other = make(symmetry, a, b)
    quick, exact = (rg.compare(a, other, symmetry, draws=99, exact=one) for one in (False, True))
    assert quick.verdict == exact.verdict, f"{quick.reason}; {exact.reason}"
    assert (quick.is_sampled, exact.is_sampled) == (is_decided, False)
    if is_decided:
        assert quick.share_after == pytest.approx(exact.share_after, abs=0.03)
        assert quick.compared < 1
        assert "4 of 6 layers, and up to 32 units" in quick.notes[-1]
    else:
        assert str(quick) == str(exact)


@pytest.mark.usefixtures("streamed")
def test_few_tensors_are_read_unless_the_answer_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry, a, _ = net("Llama")
    read = dict[str, set[str]]()
    files = {"a": a, "child": away(a, 0.3), "copy": symmetry.act(symmetry.random(generator(3)), a)}
    paths = {name: save(params, tmp_path / f"{name}.safetensors") for name, params in files.items()}
    known = Checkpoint.read

    def spy(self: Checkpoint, name: str, **settings: Any) -> torch.Tensor:
        read.setdefault(self.path.stem, set()).add(name)
        return known(self, name, **settings)

    monkeypatch.setattr(Checkpoint, "read", spy)
    assert rg.compare(paths["a"], paths["child"], symmetry, memory="2GB").is_sampled
    skipped = {name for name in a if name.startswith(("blocks.1.", "blocks.4."))}
    assert len(skipped) > 10
    assert {one: a.keys() - names for one, names in read.items()} == {"a": skipped, "child": skipped}
    read.clear()
    assert not rg.compare(paths["a"], paths["child"], symmetry, memory="2GB", exact=True).is_sampled
    assert {one: a.keys() - names for one, names in read.items()} == {"a": set(), "child": set()}
    read.clear()
    found = rg.compare(paths["a"], paths["copy"], symmetry, memory="2GB")
    assert (found.is_sampled, found.verdict) == (False, "same network in another gauge")
    assert {one: a.keys() - names for one, names in read.items()} == {"a": set(), "copy": set()}


@pytest.mark.usefixtures("streamed")
def test_equal_networks_are_not_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry, a, _ = net("Llama")
    paths = [save(a, tmp_path / f"{name}.safetensors") for name in "ab"]
    for name in ("match_streamed", "match_whole", "compare_sampled"):
        monkeypatch.setattr(f"regauge.comparison.compare_networks.{name}", None)
    for pair in (paths, (a, dict(a))):
        found = rg.compare(*pair, symmetry, memory="2GB" if pair is paths else None)
        assert (found.verdict, found.distance, found.orbit_distance) == ("identical", 0, 0)
        assert found.share_after == pytest.approx(1)
        assert found.element[symmetry.groups[0].name].perm is not None
        assert found.p_value == 1 / 1000
    broken = {**a, "head.weight": a["head.weight"] * float("inf")}
    with pytest.raises(ValueError, match="NaN or Inf"):
        rg.compare(broken, dict(broken), symmetry)


@pytest.mark.parametrize("net_name", NETS)
def test_a_sample_has_units_of_the_whole_group_and_all_entries_of_small_axes(net_name: str) -> None:
    symmetry, a, _ = net(net_name)
    shapes = {name: tuple(t.shape) for name, t in a.items()}
    sample = Sample.of(symmetry, shapes, generator(0))
    cut = sample.cut(lambda name, indices: select(a[name], indices), sample.units)
    assert {name: tuple(t.shape) for name, t in cut.items() if name in sample.narrow.shapes} == sample.narrow.shapes
    assert sum(t.numel() for t in cut.values()) == sample.values
    stream, tokens = next(iter(sample.units.items()))[1], next(n for n in a if n.startswith("tok") or "embed" in n)
    assert torch.equal(cut[tokens], a[tokens][torch.arange(512) * 700 // 512][:, stream])
