"""Comparisons of two networks: copies, descendants, strangers, an exact test, and errors."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import kstest
from symmetries import BY_HAND, drawn, gated_units, generator, linear_heads, mlp_symmetry, stream
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.writing import save
from regauge.comparison.independence import choose_groups, measure_independence
from regauge.comparison.strangers import explain, stranger_of
from regauge.comparison.verdicts import ALIGNED, CERTAIN, RELATED, STRANGE, Evidence, judge, kinship
from regauge.core.balance import balance
from regauge.core.params import Params
from regauge.nets.transformer import Llama

WIDE = mlp_symmetry(20, 40, 30, 10, kind="scaled")
COPIES = {
    "scaled": mlp_symmetry(8, 14, 12, 3, kind="scaled"),
    "dihedral": mlp_symmetry(8, 14, 12, 3, kind="dihedral"),
    "orthogonal": mlp_symmetry(14, 9, 7, 8, kind="orthogonal"),
    "linear": mlp_symmetry(14, 9, 7, 8, kind="linear"),
    "experts": BY_HAND["experts"],
    "attention": BY_HAND["attention"],
    "families": gated_units(9)[0].bind({n: torch.zeros(s) for n, s in gated_units(9)[1].items()}),
    "linear heads": linear_heads(3, 4)[0].bind({n: torch.zeros(s) for n, s in linear_heads(3, 4)[1].items()}),
    "stream": stream(6, 9, 3),
}


def away(params: Params, share: float, seed: int) -> Params:
    """Return a network changed by a share of its size."""
    source = generator(seed)
    noise = {name: torch.randn(t.shape, generator=source, dtype=t.dtype) for name, t in params.items()}
    return {name: t + share * t.square().mean().sqrt() * noise[name] for name, t in params.items()}


def both(a: Params, b: Params) -> Callable[[str], tuple[Tensor, Tensor]]:
    return lambda name: (a[name], b[name])


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_in_another_gauge_is_the_same_network(name: str) -> None:
    symmetry = COPIES[name]
    params = drawn(symmetry, 0)
    copy = symmetry.act(symmetry.random(generator(1)), params)
    found = rg.compare(params, copy, symmetry)
    assert found.verdict == "same network in another gauge", str(found)
    assert found.distance > 0.1 * found.norm
    assert found.orbit_distance < 1e-6 * found.norm
    assert found.share_after == pytest.approx(1, abs=1e-9)
    moved = symmetry.act(found.element, copy)
    assert all(torch.allclose(moved[n], params[n], atol=1e-5) for n in params)
    assert found.fingerprint_distance is not None
    assert found.fingerprint_distance < 1e-9
    rounded = {n: t.bfloat16() for n, t in copy.items()}
    assert rg.compare(params, rounded, symmetry).verdict == "same network in another gauge"


def test_rounding_does_not_make_another_network() -> None:
    params = {name: tensor.float() for name, tensor in drawn(WIDE, 0).items()}
    assert rg.compare(params, dict(params), WIDE).verdict == "identical"
    for dtype in (torch.bfloat16, torch.float16):
        rounded = {name: tensor.to(dtype) for name, tensor in params.items()}
        assert rg.compare(params, rounded, WIDE).verdict == "identical"
        assert rg.compare({n: t.float() for n, t in rounded.items()}, params, WIDE).verdict == "identical"
    changed = {**params, "0.bias": params["0.bias"] + 0.01}
    assert rg.compare(params, changed, WIDE).verdict == "descended"


@pytest.mark.parametrize("name", ["dihedral", "linear", "attention"])
def test_strangers_aligned_at_once_are_explained_as_one_by_one(name: str) -> None:
    symmetry = COPIES[name]
    params = drawn(symmetry, 0)
    pairs = [(params, stranger_of(drawn(symmetry, seed), symmetry, 0)) for seed in range(1, 4)]
    alone = [one for pair in pairs for one in explain([pair], symmetry)]
    assert explain(pairs, symmetry) == pytest.approx(alone, abs=1e-6)
    assert len({round(share or 0, 6) for share in alone}) == 3


def test_strangers_of_other_seeds_are_others() -> None:
    first, second = (stranger_of(drawn(WIDE, 0), WIDE, seed) for seed in range(2))
    assert not any(torch.equal(first[name], second[name]) for name in WIDE.sites)


def test_descendants_and_strangers() -> None:
    params = drawn(WIDE, 0)
    child, stranger = away(params, 0.3, 1), drawn(WIDE, 2)
    stored = rg.compare(params, child, WIDE)
    assert stored.verdict == "descended"
    assert stored.p_value == 1 / 1000
    assert stored.z_score is not None
    assert stored.z_score > CERTAIN
    moved = rg.compare(params, WIDE.act(WIDE.random(generator(3)), child), WIDE)
    assert moved.verdict == "descended"
    assert "after alignment B explains" in moved.reason
    assert moved.p_value is not None
    assert moved.p_value > 0.01  # The order of its units says nothing any more.
    other = rg.compare(params, stranger, WIDE)
    assert other.verdict == "unrelated"
    assert other.share_after is not None
    assert other.share_beyond_chance is not None
    assert other.share_beyond_chance < STRANGE < RELATED <= (moved.share_beyond_chance or 0)
    assert str(rg.compare(params, stranger, WIDE)) == str(other)  # Chance has a fixed source unless one is given.


@pytest.mark.parametrize("kind", ["permutation", "scaled", "signed", "orthogonal"])
def test_alignment_alone_makes_no_descendants(kind: str) -> None:
    """With few inputs, alignment explains most of any network. Because chance is subtracted, strangers are still
    recognized.
    """
    symmetry = mlp_symmetry(2, 60, 3, kind=kind)
    found = rg.compare(drawn(symmetry, 0), drawn(symmetry, 1), symmetry, draws=99)
    assert found.share_after is not None
    assert found.share_after > RELATED
    assert found.verdict in ("unrelated", "undecided"), str(found)
    few = mlp_symmetry(2, 8, 1, kind=kind)
    assert rg.compare(drawn(few, 0), drawn(few, 1), few, draws=99).verdict == "undecided"


def test_shares_are_squared_correlations_around_what_every_element_keeps() -> None:
    a, b = drawn(WIDE, 0), drawn(WIDE, 1)
    a["1.bias"] = torch.ones_like(a["1.bias"])
    shares = {share.name: share for share in rg.compare(a, b, WIDE).shares}
    assert shares["1.bias"].before is None  # Nothing in it tells units apart.
    x, y = a["1.weight"] - a["1.weight"].mean(), b["1.weight"] - b["1.weight"].mean()
    cosine = float((x * y).sum() / (x.norm() * y.norm()))
    assert shares["1.weight"].before == pytest.approx(max(0.0, cosine) ** 2)
    x, y = a["0.weight"] - a["0.weight"].mean(0), b["0.weight"] - b["0.weight"].mean(0)  # Inputs stay where they are.
    cosine = float((x * y).sum() / (x.norm() * y.norm()))
    assert shares["0.weight"].before == pytest.approx(max(0.0, cosine) ** 2)
    layers = rg.compare(a, b, WIDE).layers
    assert [row["layer"] for row in layers] == ["0", "1", "2"]


# --- the test of independence -------------------------------------------------------------------------------------


def test_p_values_of_independent_networks_are_uniform() -> None:
    """The p-values are also uniform if units are far from normal, or if the units of all networks have a common
    component.
    """
    symmetry = mlp_symmetry(3, 6, 5, 2)
    shared, source = drawn(symmetry, 0), generator(4)
    p_values = []
    for seed in range(400):
        a, b = (
            {n: shared[n].mean(0) + t.sign() * t**4 for n, t in drawn(symmetry, 2 * seed + k).items()} for k in (1, 2)
        )
        test = measure_independence(both(a, b), symmetry, list(a), generator=source, draws=199)
        assert test is not None
        p_values.append(test.p_value)
    assert kstest(p_values, "uniform").pvalue > 0.05


def test_the_moments_of_the_null_are_those_over_all_orders() -> None:
    symmetry = mlp_symmetry(3, 4, 2)
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)

    def statistic(order: tuple[int, ...]) -> float:
        blank = symmetry.identity()
        element = blank.replace("h1", replace(blank["h1"], perm=torch.tensor(order)))
        moved, total = symmetry.act(element, b), 0.0
        for name, axis in (("0.weight", 0), ("0.bias", 0), ("1.weight", 1)):
            x, y = (t[name].movedim(axis, 0).reshape(4, -1) for t in (a, moved))
            total += float(torch.cosine_similarity(x, y).sum())
        return total

    every = torch.tensor([statistic(order) for order in itertools.permutations(range(4))])
    z_score = (statistic((0, 1, 2, 3)) - float(every.mean())) / float(every.std(correction=0))
    test = measure_independence(both(a, b), symmetry, list(a), generator=generator(0), draws=4000)
    assert test is not None
    assert test.z_score == pytest.approx(z_score, rel=1e-5)
    exact = float((every >= statistic((0, 1, 2, 3)) - 1e-6).double().mean())
    assert test.p_value == pytest.approx(exact, abs=4 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize("name", BY_HAND)
def test_tested_groups_have_no_tensor_in_common(name: str) -> None:
    symmetry = BY_HAND[name]
    chosen = choose_groups(symmetry, list(symmetry.shapes))
    names = [parameter for _, places in chosen for parameter in {place for place, _ in places}]
    assert len(names) == len(set(names))
    assert chosen or name == "rotation"


def test_references_make_it_exact_in_any_gauge() -> None:
    params = drawn(WIDE, 0)
    child = WIDE.act(WIDE.random(generator(1)), away(params, 0.2, 1))
    others = [drawn(WIDE, seed) for seed in range(2, 11)]
    assert rg.compare(params, child, WIDE, references=others).reference_p_value == 0.1
    assert rg.compare(params, drawn(WIDE, 11), WIDE, references=[*others, child]).reference_p_value != 1 / 11


# --- verdicts, data, files ----------------------------------------------------------------------------------------

NOTHING = Evidence(False, 1e-7, 1.4, 1.2, 1000, 0.2, 0.1, 0.5, 0.0)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"is_equal": True}, "identical"),
        ({"is_equal": True, "is_whole": False}, "descended"),
        ({"modulo": 1e-6, "is_whole": False}, "descended"),
        ({"stored": 1e-7}, "identical"),
        ({"modulo": 1e-6}, "same network in another gauge"),
        ({"modulo": 1e-3, "precision": 2**-8}, "same network in another gauge"),
        ({"modulo": 1e-3, "share": 1.0}, "descended"),
        ({"z_score": 7.0, "p_value": 1e-3}, ALIGNED),
        ({"z_score": 40.0, "p_value": 1e-3, "share": 0.11}, "unrelated"),  # 1% beyond chance: order decides nothing.
        ({"z_score": 40.0, "p_value": 1e-3, "share": 0.35}, ALIGNED),
        ({"z_score": 40.0, "p_value": 1e-3, "share": 0.4}, "descended"),
        ({"z_score": 40.0, "p_value": 1e-3, "free": 50}, ALIGNED),
        ({"z_score": 40.0, "p_value": 1e-3, "share": 1.0, "chance": 0.9}, ALIGNED),
        ({"z_score": 40.0, "p_value": 1e-3, "parent": "B says so"}, "descended"),
        ({"parent": "B says so"}, "descended"),
        ({"share": 0.4}, "descended"),
        ({"share": 0.35}, "undecided"),
        ({"share": 0.5, "chance": 0.5}, "unrelated"),
        ({"share": 1.0, "chance": 0.9}, "undecided"),
        ({"z_score": 4.0, "p_value": 1e-3}, "undecided"),
        ({"share": None}, "undecided"),
        ({"free": 50}, "undecided"),
        ({}, "unrelated"),
        ({"p_value": None, "z_score": None}, "unrelated"),
        ({"noise": 0.5}, "unrelated"),
        ({"noise": 2.0}, "undecided"),
        ({"noise": 2.0, "share": 0.9}, "descended"),
    ],
)
def test_verdicts_follow_the_evidence(change: dict[str, float], verdict: str) -> None:
    found, reason = judge(replace(NOTHING, **change))  # type: ignore[arg-type]
    assert found == verdict
    assert reason


def test_a_task_tells_what_the_networks_do() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    inputs = torch.randn(20, 4, generator=generator(0), dtype=torch.float64)
    symmetry = rg.discover(module, (inputs,), verify=False)
    params = {name: 2 * tensor for name, tensor in drawn(symmetry, 0).items()}
    task = rg.Task(module, [(inputs, torch.func.functional_call(module, params, (inputs,)).argmax(1))])
    copy = symmetry.act(symmetry.random(generator(1)), params)
    found = rg.compare(params, copy, symmetry, task=task).function
    assert found is not None
    assert found["change of outputs"] < 1e-12
    assert found["same predictions"] == 1
    assert found["barrier after alignment"] == pytest.approx(0, abs=1e-6)
    assert found["barrier as stored"] > 1e-3
    assert found["loss of the merge"] == pytest.approx(task.evaluate(params)["loss"], abs=1e-6)


def test_files_are_compared_as_dictionaries_are(tmp_path: Path) -> None:
    params = {name: tensor.float() for name, tensor in drawn(WIDE, 0).items()}
    child = WIDE.act(WIDE.random(generator(1)), away(params, 0.2, 1))
    for name, network in (("a", params), ("b", child)):
        save(network, tmp_path / f"{name}.safetensors")
    paths = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    known, read = rg.compare(params, child, WIDE), rg.compare(*paths, WIDE)
    assert str(read) == str(known)


def test_bad_networks_are_refused() -> None:
    params = drawn(WIDE, 0)
    broken: dict[str, Tensor] = {**params, "0.bias": params["0.bias"] / 0}
    with pytest.raises(ValueError, match=r"'0.bias' of the second network holds NaN or Inf in \d+ of"):
        rg.compare(params, broken, WIDE)
    with pytest.raises(ValueError, match="both must come from the same architecture"):
        rg.compare(params, {name: tensor.unsqueeze(-1) for name, tensor in params.items()}, WIDE)
    with pytest.raises(ValueError, match="only the first has"):
        rg.compare(params, {name: params[name] for name in params if name != "1.bias"}, WIDE)
    population = {name: tensor[None] for name, tensor in params.items()}
    with pytest.raises(ValueError, match="compare single networks"):
        rg.compare(population, population, WIDE)
    with pytest.raises(ValueError, match="at least one random element"):
        rg.compare(params, params, WIDE, draws=0)
    codes = {**params, "0.weight": (10 * params["0.weight"]).to(torch.int8)}
    with pytest.raises(ValueError, match="quantized weights must be dequantized first"):
        rg.compare(codes, codes, WIDE)


# --- other widths, vocabularies and numbers of layers ---------------------------------------------------------------


def text_network(tokens: int, layers: int, seed: int) -> Params:
    module, source = Llama(tokens, width=16, layers=layers, heads=2, kv_heads=1), generator(seed)
    return {name: 0.3 * torch.randn(t.shape, generator=source) for name, t in module.state_dict().items()}


@pytest.fixture(scope="module")
def text_symmetry() -> rg.Symmetry:
    module = Llama(12, width=16, layers=2, heads=2, kv_heads=1).eval()
    return rg.discover(module, (torch.zeros(2, 4, dtype=torch.long),), verify=False)


def extended(params: Params) -> Params:
    """Return the network with three additional tokens."""
    rows = torch.randn(3, 16, generator=generator(9))
    return {n: torch.cat([t, rows]) if n in ("embedding.weight", "head.weight") else t for n, t in params.items()}


def test_networks_of_other_shapes_are_compared_in_what_they_share(text_symmetry: rg.Symmetry, tmp_path: Path) -> None:
    a, noise = text_network(12, 2, 0), text_network(12, 2, 1)
    child = {name: tensor + 0.2 * noise[name] for name, tensor in a.items()}
    moved = text_symmetry.act(text_symmetry.random(generator(2)), child)
    deeper = {**text_network(12, 3, 3), **moved}
    cases = {
        "extended": (extended(moved), "compared are the first 12 along axis 0, where A has 12 and B 15"),
        "deeper": (deeper, "left out, because only B has them: 'blocks.2."),
        "shallow": ({n: t for n, t in moved.items() if "blocks.1." not in n}, "only A has them: 'blocks.1."),
        "other MLP": ({n: t[:40] if "gate.weight" in n else t for n, t in moved.items()}, "shape differs"),
    }
    results = {name: rg.compare(a, b, text_symmetry) for name, (b, _) in cases.items()}
    for name, (b, sentence) in cases.items():
        found = results[name]
        assert found.verdict == "descended", (name, found.reason)
        assert "after alignment B explains" in found.reason
        assert any(sentence in note for note in found.notes), found.notes
        kept = sum(t.numel() for n, t in a.items() if n in b and b[n].shape >= t.shape)
        assert found.compared == pytest.approx(kept / sum(t.numel() for t in a.values()))
    strange = rg.compare(a, extended(text_network(12, 2, 5)), text_symmetry)
    assert strange.verdict == "unrelated", strange.reason
    save(a, tmp_path / "a.safetensors")
    save(extended(moved), tmp_path / "b.safetensors")
    read = rg.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors", text_symmetry)
    assert str(read) == str(results["extended"])


def test_a_part_is_compared_only_where_that_means_something(text_symmetry: rg.Symmetry) -> None:
    a = text_network(12, 2, 0)
    few = {**a, "head.weight": a["head.weight"][:5]}  # Other classes: not the first of these.
    found = rg.compare(a, few, text_symmetry)
    assert "head.weight" not in {share.name for share in found.shares}
    assert found.notes == ("left out, because its shape differs: 'head.weight', (12, 16) in A and (5, 16) in B",)
    with pytest.raises(ValueError, match=r"only the first has 'blocks.1.attention_norm.weight'"):
        rg.compare(a, {n: t for n, t in a.items() if n != "blocks.1.attention_norm.weight"}, text_symmetry)
    with pytest.raises(ValueError, match="both must come from the same architecture"):
        rg.compare(a, {n: torch.cat([t, t], -1) for n, t in a.items()}, text_symmetry)
    task = rg.Task(nn.Linear(1, 1), [(torch.zeros(1, 1), torch.zeros(1, 1))])
    with pytest.raises(ValueError, match="a task runs both networks with one model, but they differ"):
        rg.compare(a, extended(a), text_symmetry, task=task)


def norm(params: rg.Params) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in params.values()))


def test_norms_tell_siblings_from_descendants_wherever_they_are_on_their_orbits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(40, 120), nn.ReLU(), nn.Linear(120, 30)).double()
    symmetry = rg.discover(module, (torch.zeros(2, 40, dtype=torch.float64),))
    ancestor = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    ancestor = symmetry.act(balance(ancestor, symmetry), ancestor)

    def step(seed: int) -> rg.Params:
        source = generator(seed)
        return {n: 0.2 * (t.std() * torch.randn(t.shape, generator=source) + t / 2) for n, t in ancestor.items()}

    one, other = ({n: t + step(seed)[n] for n, t in ancestor.items()} for seed in (1, 2))
    lengths = [norm(symmetry.act(balance(p, symmetry), p)) for p in (one, other)]
    other = {n: t * (lengths[0] / lengths[1]) for n, t in other.items()}  # Trained for as long.
    for a, b, sentence in ((ancestor, one, "one seems to descend"), (one, other, "both seem to descend")):
        found = rg.compare(a, b, symmetry)
        assert found.verdict == "descended"
        assert sentence in found.reason
        assert found.lean is not None
        assert abs(found.lean) > 1.5 if a is ancestor else abs(found.lean) < 0.25
        assert rg.compare(b, a, symmetry).lean == pytest.approx(-found.lean, abs=0.05)
        g, h = (symmetry.random(generator(seed)) for seed in (3, 4))
        moved = rg.compare(symmetry.act(g, a), symmetry.act(h, b), symmetry)
        assert moved.lean == pytest.approx(found.lean, abs=1e-6)
    assert rg.compare(ancestor, dict(ancestor), symmetry).lean is None
    assert kinship(None) == kinship(1.0) == kinship(-1.0) == "one descends from the other, or both from a third"
