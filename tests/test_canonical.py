"""Canonical forms: one network for each orbit, with the same function, and the manifold of these networks."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import CASES, Case, symmetry_of
from symmetries import BY_HAND, drawn, gated_units, generator, linear_heads, mlp_symmetry, twice_nested
from torch import Tensor, nn

import regauge as rg
from regauge import Params, Symmetry
from regauge.canonical.step_plan import Span
from regauge.checkpoints.alignments import load_alignment
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core import sphere
from regauge.core.probe import InDouble


def sized(made: tuple[Symmetry, dict[str, tuple[int, ...]]]) -> Symmetry:
    symmetry, shapes = made
    return symmetry.bind({name: torch.zeros(shape) for name, shape in shapes.items()})


ALL_FIXED = {
    **{name: symmetry for name, symmetry in BY_HAND.items() if name != "linear"},
    "wide orthogonal": mlp_symmetry(2, 5, 9, 3, kind="orthogonal"),
    "linear": mlp_symmetry(9, 4, 5, kind="linear"),
    "linear chain": mlp_symmetry(12, 4, 5, 9, kind="linear"),
    "families": sized(gated_units(4)),
    "nested linear": sized(linear_heads(3, 4)),
    "twice nested": sized(twice_nested(3, 2)),
    "one unit": mlp_symmetry(3, 1, 2, kind="scaled"),
    "scaled both ways": Symmetry.from_axes(
        {"ih": ("h", None), "hh": ("h", "h"), "out": (None, "h")}, kinds={"h": "scaled"}
    ).bind({"ih": torch.zeros(6, 3), "hh": torch.zeros(6, 6), "out": torch.zeros(2, 6)}),
}
"""Explicit symmetries that the canonical form fixes completely."""

FOUND = [
    "mlp_relu",
    "mlp_leaky",
    "mlp_tanh",
    "mlp_sine",
    "siren",
    "cnn_flatten",
    "glu",
    "gru",
    "rnn_relu",
    "grouped_conv",
    "depthwise_multiplier",
    "shuffle_unit",
    "skip_nerf",
    "squeeze_excite",
    "concatenation",
    "tied_autoencoder",
    "called_twice",
    "torch_transformer",
    "hf_llama",
]


def largest_difference(a: Params, b: Params) -> float:
    """Return the largest difference, relative to the size of each tensor."""
    assert a.keys() == b.keys()
    differences = [0.0]
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        if tensor.is_floating_point() and tensor.numel():
            size = float(tensor.abs().max()) + 1e-3
            differences.append(float((tensor.double() - b[name].double()).abs().max()) / size)
    return max(differences)


class Normalized(nn.Module):
    """Batch normalization before a ReLU, twice, with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm1 = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.fc2, self.norm2, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.fc1(x)).relu()
        return self.head((x + self.norm2(self.fc2(x))).relu())


NORMALIZED = Case("normalized", Normalized, lambda: (torch.randn(4, 5),), "")
MODELS = {**{case.name: case for case in CASES if case.name in FOUND}, "normalized": NORMALIZED}


def discovered(case: Case) -> tuple[nn.Module, Symmetry, Params]:
    """Return a model in float64, far from its initial values."""
    torch.manual_seed(0)
    module = copy.deepcopy(case.module()).double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in case.inputs())
    symmetry = symmetry_of(case) if case in CASES else rg.discover(module, inputs, verify=False)
    chance = generator(1)
    params = {}
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=chance, dtype=torch.float64)
        params[name] = tensor + 0.1 * noise.to(tensor.dtype) if tensor.is_floating_point() else tensor
        if "running_var" in name:
            params[name] = 1 + noise.abs()
    for names in symmetry.tied:
        params |= dict.fromkeys(names[1:], params[names[0]])
    return module, symmetry, params


# --- the law -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_FIXED)
def test_one_form_for_each_orbit(name: str) -> None:
    symmetry = ALL_FIXED[name]
    assert rg.canonical.canonical_manifold(symmetry).left == ()
    for seed in range(3):
        params = drawn(symmetry, seed)
        kept = {key: tensor.clone() for key, tensor in params.items()}
        element = rg.canonical.canonical_element(params, symmetry)
        canonical = rg.canonicalize(params, symmetry)
        assert largest_difference(canonical, symmetry.act(element, params)) == 0
        moved = symmetry.act(symmetry.random(generator(seed)), params)
        assert largest_difference(canonical, rg.canonicalize(moved, symmetry)) < 1e-9
        assert largest_difference(canonical, rg.canonicalize(canonical, symmetry)) < 1e-9
        assert all(torch.equal(params[key], kept[key]) for key in params)


@pytest.mark.parametrize("name", MODELS)
def test_found_symmetries_are_fixed_and_functions_kept(name: str) -> None:
    case = MODELS[name]
    module, symmetry, params = discovered(case)
    assert rg.canonical.canonical_manifold(symmetry).left == ()
    canonical = rg.canonicalize(params, symmetry)
    moved = symmetry.act(symmetry.random(generator(2)), params)
    assert largest_difference(canonical, rg.canonicalize(moved, symmetry)) < 1e-9
    assert largest_difference(canonical, rg.canonicalize(canonical, symmetry)) < 1e-9
    inputs = tuple(x.double() if x.is_floating_point() else x for x in case.inputs())
    with torch.no_grad(), InDouble():
        outputs = [torch.func.functional_call(module, p, inputs, case.kwargs()) for p in (params, canonical)]
    before, after = (output if isinstance(output, Tensor) else output.logits for output in outputs)
    assert torch.allclose(before, after, rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("name", ["scaled", "dihedral", "families", "nested linear", "twice nested", "attention"])
def test_a_population_is_a_loop(name: str) -> None:
    symmetry = ALL_FIXED[name]
    networks = [drawn(symmetry, seed) for seed in range(3)]
    population = {key: torch.stack([p[key] for p in networks]) for key in networks[0]}
    together = rg.canonicalize(population, symmetry)
    for k, params in enumerate(networks):
        alone = rg.canonicalize(params, symmetry)
        assert largest_difference(alone, {key: tensor[k] for key, tensor in together.items()}) < 1e-12
    reference = drawn(symmetry, 9)
    together = rg.canonicalize(population, symmetry, reference=reference)
    for k, params in enumerate(networks):
        alone = rg.canonicalize(params, symmetry, reference=reference)
        assert largest_difference(alone, {key: tensor[k] for key, tensor in together.items()}) < 1e-9


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("scaled", ("scale",)),
        ("scaled", ("permutation",)),
        ("families", ("scale", "sign")),
        ("dihedral", ("sign", "shift")),
        ("nested linear", ("linear",)),
        ("nested linear", ("scale", "sign")),
        ("attention", ("linear",)),
        ("rotary", ("linear",)),
    ],
)
def test_parts_are_fixed_alone(name: str, parts: tuple[str, ...]) -> None:
    symmetry = ALL_FIXED[name]
    params = drawn(symmetry, 0)
    canonical = rg.canonicalize(params, symmetry, parts=parts)
    moved = symmetry.act(symmetry.random(generator(1), parts), params)
    assert largest_difference(canonical, rg.canonicalize(moved, symmetry, parts=parts)) < 1e-9
    everything = rg.canonicalize(params, symmetry)
    assert largest_difference(everything, rg.canonicalize(canonical, symmetry)) < 1e-9
    assert largest_difference(everything, canonical) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    symmetry = mlp_symmetry(6, 8, 7, 3, kind="scaled")
    params = drawn(symmetry, 0, dtype)
    canonical = rg.canonicalize(params, symmetry)
    exact = rg.canonicalize({name: tensor.double() for name, tensor in params.items()}, symmetry)
    for name, tensor in canonical.items():
        assert tensor.dtype == dtype
        assert torch.allclose(tensor.double(), exact[name], atol=8 * torch.finfo(dtype).eps)


# --- what it looks like ------------------------------------------------------------------------------------------


def test_incoming_weights_have_norm_one_and_biases_follow() -> None:
    symmetry = mlp_symmetry(4, 9, 7, 3, kind="scaled")
    params = drawn(symmetry, 0)
    canonical = rg.canonicalize(params, symmetry, parts=["scale"])
    norms = params["0.weight"].norm(dim=1)
    assert torch.allclose(canonical["0.weight"], params["0.weight"] / norms[:, None])
    assert torch.allclose(canonical["0.bias"], params["0.bias"] / norms)
    second = params["1.weight"] * norms
    assert torch.allclose(canonical["1.weight"], second / second.norm(dim=1, keepdim=True))
    assert torch.allclose(canonical["2.weight"], params["2.weight"] * second.norm(dim=1))
    sums = rg.canonicalize(params, symmetry)["0.weight"].sum(1)
    assert torch.equal(sums, sums.sort().values)


def test_signs_are_those_of_the_sums_and_biases_lie_in_one_cell() -> None:
    symmetry = Symmetry.from_axes(
        {"w": ("h", None), "b": ("h",), "v": (None, "h")}, kinds={"h": "dihedral"}, omegas={"h": 30.0}
    )
    chance = generator(0)
    params = {
        "w": torch.randn(50, 2, generator=chance, dtype=torch.float64),
        "b": torch.randn(50, generator=chance, dtype=torch.float64),
        "v": torch.randn(1, 50, generator=chance, dtype=torch.float64),
    }
    canonical = rg.canonicalize(params, symmetry)
    assert bool((canonical["w"].sum(1) > 0).all())
    half = math.pi / 60
    assert bool(((canonical["b"] > -half) & (canonical["b"] <= half)).all())
    x = torch.randn(7, 2, generator=chance, dtype=torch.float64)

    def signal(p: Params) -> Tensor:
        return torch.sin(30 * (x @ p["w"].T + p["b"])) @ p["v"].T

    assert torch.allclose(signal(params), signal(canonical), atol=1e-9)
    edge = {
        "w": torch.ones(2, 1).double(),
        "b": torch.tensor([half, -half], dtype=torch.float64),
        "v": torch.ones(1, 2).double(),
    }
    assert torch.allclose(
        rg.canonicalize(edge, symmetry, parts=["shift"])["b"], torch.full((2,), half, dtype=torch.float64), atol=1e-9
    )


def test_queries_and_keys_become_balanced_singular_vectors() -> None:
    symmetry = ALL_FIXED["nested linear"]
    params = drawn(symmetry, 0)
    canonical = rg.canonicalize(params, symmetry)
    q, k = (canonical[name].reshape(3, 4, 7) for name in ("q", "k"))
    grams = [x @ x.mT for x in (q, k)]
    values = torch.linalg.svdvals(q.mT @ k)[:, :4]
    for gram in grams:
        assert torch.allclose(gram, torch.diag_embed(values), atol=1e-10)


def test_dead_units_keep_the_function_and_constant_ones_get_their_bias_or_readers_scaled() -> None:
    symmetry = mlp_symmetry(4, 5, 3, kind="scaled")
    params = drawn(symmetry, 0)
    params["0.weight"][1] = 0
    params["0.weight"][3], params["0.bias"][3] = 0, 0
    params["1.weight"][:, 4] = 0
    scaled = rg.canonicalize(params, symmetry, parts=["scale"])
    assert float(scaled["0.bias"][1].abs()) == pytest.approx(1)
    assert float(scaled["1.weight"][:, 3].norm()) == pytest.approx(1)
    assert float(scaled["0.weight"][4].norm()) == pytest.approx(1)
    canonical = rg.canonicalize(params, symmetry)
    assert all(bool(tensor.isfinite().all()) for tensor in canonical.values())
    x = torch.randn(6, 4, generator=generator(0), dtype=torch.float64)

    def output(p: Params) -> Tensor:
        return torch.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["1.weight"].T

    assert torch.allclose(output(params), output(canonical))
    g = symmetry.random(generator(1))
    assert largest_difference(canonical, rg.canonicalize(symmetry.act(g, params), symmetry)) < 1e-12


class AttentionBeforeRelu(nn.Module):
    """Units whose incoming weights are mixed by the matrix of values, and whose biases are initially zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.read = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.read(self.attention(x, x, x)[0].relu())
        return mixed


def test_units_whose_incoming_weights_are_mixed_and_biases_zero_have_one_form_too() -> None:
    torch.manual_seed(0)
    module = AttentionBeforeRelu().double().eval()
    x = torch.randn(2, 5, 4, generator=generator(0), dtype=torch.float64)
    symmetry = rg.discover(module, (x,))
    params = dict(module.state_dict())
    assert not bool(params["attention.out_proj.bias"].any())
    canonical = rg.canonicalize(params, symmetry)
    with torch.no_grad():
        assert torch.allclose(module(x), torch.func.functional_call(module, canonical, (x,)), atol=1e-12)
    for seed in range(3):
        moved = symmetry.act(symmetry.random(generator(seed)), params)
        assert largest_difference(canonical, rg.canonicalize(moved, symmetry)) < 1e-10
        assert rg.canonical.orbit_distance(params, moved, symmetry) < 1e-10
    # A column of what reads the units is not on the orbit.
    other = {**params, "read.weight": params["read.weight"] * torch.linspace(1, 2, 6, dtype=torch.float64)[:, None]}
    assert rg.canonical.orbit_distance(params, other, symmetry) > 0.1


def test_biases_that_are_zero_in_a_representative_fix_no_scale() -> None:
    """Batch normalization frees the units of the second of two linear layers, so their weights are known last."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    module = nn.Sequential(*layers).double().eval()
    symmetry = rg.discover(module, torch.randn(5, 6, dtype=torch.float64))
    assert {"1.bias", "2.running_mean"} <= {family.name for family in symmetry.translations}
    params = {
        name: t.detach() + torch.rand(t.shape, dtype=t.dtype, generator=generator(0))
        for name, t in module.state_dict().items()
        if t.is_floating_point()
    }
    first = rg.canonicalize(params, symmetry)
    for seed in range(3):
        other = rg.canonicalize(symmetry.act(symmetry.random(generator(seed)), params), symmetry)
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-8, atol=1e-8, msg=name)
    changed = rg.canonicalize(params | {"1.weight": params["1.weight"] + torch.eye(4, 3)}, symmetry)
    assert not torch.allclose(changed["1.weight"], first["1.weight"], atol=1e-2)


def test_ties_of_sums_are_broken_by_later_powers_and_by_entries() -> None:
    symmetry = mlp_symmetry(4, 4, 2, kind="signed")
    params = drawn(symmetry, 0)
    params["0.weight"] = torch.tensor([[1, -1, 0, 0], [2, -1, -1, 0], [1, 2, 3, 4], [4, 3, 2, 1]]).double()
    canonical = rg.canonicalize(params, symmetry)
    for seed in range(5):
        moved = symmetry.act(symmetry.random(generator(seed)), params)
        assert largest_difference(canonical, rg.canonicalize(moved, symmetry)) < 1e-12
    expected = torch.tensor([[1, -1, 0, 0], [2, -1, -1, 0], [1, 2, 3, 4], [4, 3, 2, 1]]).double()
    assert torch.equal(canonical["0.weight"][1:], expected[1:])
    assert torch.equal(canonical["0.weight"][0].abs(), expected[0].abs())


def test_equal_units_change_nothing() -> None:
    symmetry = mlp_symmetry(3, 6, 2, kind="scaled")
    params = {name: torch.ones_like(tensor) for name, tensor in drawn(symmetry, 0).items()}
    moved = symmetry.act(symmetry.random(generator(0), ["permutation", "scale"]), params)
    assert largest_difference(rg.canonicalize(params, symmetry), rg.canonicalize(moved, symmetry)) < 1e-12


def test_what_cannot_be_fixed_is_named() -> None:
    wheel = Symmetry.from_axes({"w": ("h", "h")}, kinds={"h": "scaled"}).bind({"w": torch.zeros(3, 3)})
    left = rg.canonical.canonical_manifold(wheel).left
    assert [sentence.partition(",")[0] for sentence in left] == [
        "group 'h': scales are not fixed",
        "group 'h': its order is not fixed",
    ]
    params = drawn(wheel, 0)
    assert torch.equal(rg.canonicalize(params, wheel)["w"], params["w"])


# --- to a reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["scaled", "signed", "dihedral", "attention", "rotary", "families", "experts", "stream"]
)
def test_a_reference_gives_order_and_signs_and_still_one_form(name: str) -> None:
    symmetry = ALL_FIXED[name]
    reference, params = drawn(symmetry, 5), drawn(symmetry, 6)
    canonical = rg.canonicalize(params, symmetry, reference=reference)
    moved = symmetry.act(symmetry.random(generator(0)), params)
    assert largest_difference(canonical, rg.canonicalize(moved, symmetry, reference=reference)) < 1e-8
    element = rg.canonical.canonical_element(
        params, symmetry, reference=reference, method=rg.WeightMatching(scales="keep")
    )
    assert largest_difference(canonical, symmetry.act(element, params)) == 0
    for method in (None, rg.WeightMatching(scales="balance")):
        canonical = rg.canonicalize(params, symmetry, reference=reference, method=method)
        assert largest_difference(canonical, rg.canonicalize(canonical, symmetry, parts=["scale"])) < 1e-9


def test_the_reference_itself_keeps_its_order() -> None:
    symmetry = mlp_symmetry(5, 9, 3, kind="scaled")
    reference = drawn(symmetry, 5)
    moved = symmetry.act(symmetry.random(generator(0)), reference)
    found = rg.canonicalize(moved, symmetry, reference=reference)
    assert largest_difference(found, rg.canonicalize(reference, symmetry, parts=["scale"])) < 1e-12


def test_what_is_refused() -> None:
    symmetry = mlp_symmetry(3, 4, 2, kind="scaled")
    params = drawn(symmetry, 0)
    with pytest.raises(ValueError, match="leave out either `parts` or `reference`"):
        rg.canonicalize(params, symmetry, reference=params, parts=["scale"])
    with pytest.raises(ValueError, match="alignment to a reference"):
        rg.canonicalize(params, symmetry, method=rg.WeightMatching())
    with pytest.raises(ValueError, match=r"parts \['scales'\] are unknown"):
        rg.canonicalize(params, symmetry, parts=["scales"])
    with pytest.raises(ValueError, match="NaN or Inf"):
        rg.canonicalize({**params, "0.bias": torch.full((4,), math.nan).double()}, symmetry)
    with pytest.raises(KeyError, match="lack"):
        rg.canonicalize({"0.bias": params["0.bias"]}, symmetry)


# --- the manifold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaled", "families", "nested linear", "signed", "scaled both ways"])
def test_geodesics_stay_canonical_with_exact_ends_and_constant_speed(name: str) -> None:
    symmetry = ALL_FIXED[name]
    manifold = rg.canonical.canonical_manifold(symmetry)
    a, b = (rg.canonicalize(drawn(symmetry, seed), symmetry) for seed in (0, 1))
    whole = float(manifold.distance(a, b))
    assert float(manifold.distance(a, a)) == 0
    for end, t in ((a, 0.0), (b, 1.0)):
        assert all(torch.equal(manifold.geodesic(a, b, t)[key], end[key]) for key in a)
    for t in (0.25, 0.5):
        here = manifold.geodesic(a, b, t)
        scaled = rg.canonicalize(here, symmetry, parts=["scale"])
        assert largest_difference(here, scaled) < 1e-12
        assert float(manifold.distance(a, here)) == pytest.approx(t * whole, abs=1e-9)
        assert float(manifold.distance(here, b)) == pytest.approx((1 - t) * whole, abs=1e-9)
    velocity = manifold.log(a, b)
    assert largest_difference(manifold.exp(a, velocity), b) < 1e-9
    half = manifold.exp(a, {key: tensor / 2 for key, tensor in velocity.items()})
    assert largest_difference(half, manifold.geodesic(a, b, 0.5)) < 1e-9
    assert largest_difference(manifold.mean([a, b]), manifold.geodesic(a, b, 0.5)) < 1e-9
    assert largest_difference(manifold.mean([a, b], weights=[3, 1]), manifold.geodesic(a, b, 0.25)) < 1e-9
    assert largest_difference(manifold.mean([b]), b) < 1e-12


def test_the_manifold_of_a_classifier_is_that_of_the_paper() -> None:
    symmetry = mlp_symmetry(4, 9, 7, 3, kind="scaled")
    canonical = rg.canonicalize(drawn(symmetry, 0), symmetry)
    normalized = rg.canonical.normalize_logits(canonical, symmetry, weight="2.weight", bias="2.bias")
    manifold = rg.canonical.canonical_manifold(symmetry, head="2.weight")
    assert [(s.label, s.count, s.dim) for s in manifold.spheres] == [
        ("0.weight", 9, 4),
        ("1.weight", 7, 9),
        ("2.weight", 1, 21),
    ]
    assert "9 unit spheres in 4 dimensions: 0.weight" in str(manifold)
    other = rg.canonicalize(drawn(symmetry, 1), symmetry)
    other = rg.canonical.normalize_logits(other, symmetry, weight="2.weight", bias="2.bias")
    squares = [
        sphere.distance(normalized["0.weight"], other["0.weight"]).square().sum(),
        sphere.distance(normalized["1.weight"], other["1.weight"]).square().sum(),
        sphere.distance(normalized["2.weight"].flatten(), other["2.weight"].flatten()).square(),
        *((normalized[f"{k}.bias"] - other[f"{k}.bias"]).square().sum() for k in range(3)),
    ]
    assert float(manifold.distance(normalized, other)) == pytest.approx(float(sum(squares)) ** 0.5)
    with pytest.raises(ValueError, match=r"2\.weight do not have norm one"):
        manifold.distance(canonical, canonical)


def test_a_population_of_canonical_networks() -> None:
    symmetry = ALL_FIXED["scaled"]
    manifold = rg.canonical.canonical_manifold(symmetry)
    a, b = (
        rg.canonicalize(
            {k: torch.stack([drawn(symmetry, s)[k], drawn(symmetry, s + 1)[k]]) for k in symmetry.sites}, symmetry
        )
        for s in (0, 2)
    )
    distances = manifold.distance(a, b)
    halfway = manifold.geodesic(a, b, 0.5)
    for k in range(2):
        one, other = ({name: tensor[k] for name, tensor in p.items()} for p in (a, b))
        assert float(distances[k]) == pytest.approx(float(manifold.distance(one, other)))
        here = {name: tensor[k] for name, tensor in halfway.items()}
        assert largest_difference(here, manifold.geodesic(one, other, 0.5)) < 1e-12


def test_units_without_incoming_weights_move_straight() -> None:
    symmetry = mlp_symmetry(4, 5, 3, kind="scaled")
    a, b = (rg.canonicalize(drawn(symmetry, seed), symmetry) for seed in (0, 1))
    a["0.weight"][2] = 0
    manifold = rg.canonical.canonical_manifold(symmetry)
    here = manifold.geodesic(a, b, 0.5)
    assert torch.allclose(here["0.weight"][2], b["0.weight"][2] / 2)
    assert torch.allclose(here["0.weight"][1].norm(), torch.ones(()).double())


def test_what_the_manifold_refuses() -> None:
    symmetry = mlp_symmetry(4, 5, 3, kind="scaled")
    raw = drawn(symmetry, 0)
    manifold = rg.canonical.canonical_manifold(symmetry)
    canonical = rg.canonicalize(raw, symmetry)
    opposite = {**canonical, "0.weight": -canonical["0.weight"]}
    with pytest.raises(ValueError, match=r"bring it there with `regauge\.canonicalize`"):
        manifold.log(raw, canonical)
    with pytest.raises(ValueError, match=r"5 units of 0\.weight are at opposite points"):
        manifold.geodesic(canonical, opposite, 0.5)
    assert float(manifold.distance(canonical, opposite)) == pytest.approx(math.pi * 5**0.5)
    with pytest.raises(ValueError, match="no single mean"):
        manifold.mean([canonical, opposite])
    with pytest.raises(ValueError, match="needs at least one"):
        manifold.mean([])
    with pytest.raises(ValueError, match="do not fit 1 networks"):
        manifold.mean([canonical], weights=[1, 2])
    with pytest.raises(KeyError, match="no parameter 'head' for a head"):
        rg.canonical.canonical_manifold(symmetry, head="head")
    with pytest.raises(ValueError, match="already lie on spheres"):
        rg.canonical.canonical_manifold(symmetry, head="0.weight")


# --- the last layer, and orbits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1.0, 3**0.5])
def test_normalized_logits_keep_the_class_and_change_the_loss(norm: float) -> None:
    symmetry = mlp_symmetry(4, 9, 3, kind="scaled")
    networks = [drawn(symmetry, 0), drawn(symmetry, 1)]
    population = {name: torch.stack([p[name] for p in networks]) for name in symmetry.sites}
    population["1.bias"] = torch.randn(2, 3, generator=generator(0), dtype=torch.float64)
    together = rg.canonical.normalize_logits(population, symmetry, weight="1.weight", bias="1.bias", norm=norm)
    for k in range(2):
        before, after = ({name: t[k] for name, t in p.items()} for p in (population, together))
        alone = rg.canonical.normalize_logits(before, symmetry, weight="1.weight", bias="1.bias", norm=norm)
        assert largest_difference(alone, after) < 1e-12
        assert float(after["1.weight"].norm()) == pytest.approx(norm)
        x = torch.randn(20, 4, generator=generator(k), dtype=torch.float64)
        logits = [
            torch.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["1.weight"].T + p["1.bias"] for p in (before, after)
        ]
        assert torch.equal(logits[0].argmax(1), logits[1].argmax(1))
        factor = norm / before["1.weight"].norm()
        assert torch.allclose(logits[0] * factor, logits[1])
        assert abs(float(factor) - 1) > 0.1


def test_what_normalizing_logits_refuses() -> None:
    symmetry = mlp_symmetry(4, 9, 3, kind="scaled")
    params = drawn(symmetry, 0)
    with pytest.raises(KeyError, match="no parameter 'head'"):
        rg.canonical.normalize_logits(params, symmetry, weight="head")
    with pytest.raises(ValueError, match="must be positive"):
        rg.canonical.normalize_logits(params, symmetry, weight="1.weight", norm=0)
    with pytest.raises(ValueError, match="is zero, so no factor"):
        rg.canonical.normalize_logits({**params, "1.weight": torch.zeros(3, 9)}, symmetry, weight="1.weight")


@pytest.mark.parametrize("name", ["scaled", "dihedral", "attention", "stream", "families"])
def test_distances_of_orbits(name: str) -> None:
    symmetry = ALL_FIXED[name]
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    here = rg.canonical.orbit_distance(a, b, symmetry)
    chance = generator(0)
    there = rg.canonical.orbit_distance(
        symmetry.act(symmetry.random(chance), a), symmetry.act(symmetry.random(chance), b), symmetry
    )
    assert there == pytest.approx(here, abs=1e-7)
    assert rg.canonical.orbit_distance(a, symmetry.act(symmetry.random(chance), a), symmetry) < 1e-9
    first, second = rg.canonicalize(a, symmetry), rg.canonicalize(b, symmetry)
    apart = math.sqrt(sum(float((first[key] - second[key]).square().sum()) for key in a))
    assert 0 < here <= apart + 1e-9


def test_a_span_settles_what_depends_on_it() -> None:
    span = Span(3)
    assert [float(x) for x in span.settle((-1, 1, 0))] == [-1, 0, 0]
    assert not span.is_everything
    assert not span.contains((1, 0, 0))
    assert span.is_same((1, 0, 0), (0, 1, 0))
    direction = span.settle((0, 1, 0))
    assert direction[0] == direction[1] == 1
    assert span.contains((5, 2, 0))
    span.settle((1, 1, 2))
    assert span.is_everything
    signs = Span(2, is_binary=True)
    signs.settle((1, 1))
    assert signs.contains((1, 1))
    assert signs.is_same((1, 0), (0, 1))


# --- the command line --------------------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.ones(2, 4)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a model and three checkpoints, of which the last lies on the orbit of the
    first.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynets.py").write_text(FACTORY)
    shapes = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}
    for name, seed in (("a", 0), ("b", 1)):
        chance = generator(seed)
        save({k: torch.randn(s, generator=chance) for k, s in shapes.items()}, tmp_path / f"{name}.safetensors")
    axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
    symmetry = Symmetry.from_axes(axes, kinds={"h": "scaled"})
    a = load(tmp_path / "a.safetensors")
    save(symmetry.act(symmetry.random(generator(0)), a), tmp_path / "a2.safetensors")
    return tmp_path


def test_canonicalize_then_undo(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "mynets.py:model")
    main(["canonicalize", "a.safetensors", *model, "-o", "one.safetensors"])
    out = capsys.readouterr().out
    assert "8 unit spheres in 4 dimensions: 0.weight" in out
    assert "written: one.safetensors and one.alignment.safetensors" in out
    main(["canonicalize", "a2.safetensors", *model, "-o", "two.safetensors"])
    one, two, a = (load(folder / f"{name}.safetensors") for name in ("one", "two", "a"))
    assert largest_difference(one, two) < 1e-5
    assert load_alignment(folder / "one.alignment.safetensors").symmetry.groups[0].size == 8
    main(["apply", "one.safetensors", "one.safetensors", "--inverse", "-o", "back.safetensors"])
    assert largest_difference(load(folder / "back.safetensors"), a) < 1e-5
    main(["discover", "mynets.py:model", "-o", "found.json"])
    main(["canonicalize", "a.safetensors", "--symmetry", "found.json", "-o", "three.safetensors"])
    assert largest_difference(load(folder / "three.safetensors"), one) == 0
    main(["canonicalize", "a2.safetensors", *model, "--reference", "a.safetensors", "-o", "four.safetensors"])
    norms = a["0.weight"].norm(dim=1, keepdim=True)
    assert torch.allclose(load(folder / "four.safetensors")["0.weight"], a["0.weight"] / norms, atol=1e-5)


def test_the_command_refuses(folder: Path, refused: Callable[..., str]) -> None:
    start = ["canonicalize", "a.safetensors", "-o", "out.safetensors"]
    assert "the symmetry is unknown: name the model with --model" in refused(*start)
    assert "there is no symmetry 'absent.json'" in refused(*start, "--symmetry", "absent.json")
    model = ["--model", "mynets.py:model"]
    assert "there is no checkpoint 'absent.pt'" in refused(*start, *model, "--reference", "absent.pt")
    assert "'b.safetensors' exists already" in refused("canonicalize", "a.safetensors", "-o", "b.safetensors", *model)
    save({"0.weight": torch.zeros(8, 4)}, folder / "bad.safetensors")
    assert "lacks '0.bias'" in refused("canonicalize", "bad.safetensors", "-o", "out.safetensors", *model)
    assert "lacks '0.bias'" in refused(*start, *model, "--reference", "bad.safetensors")
    assert not (folder / "out.safetensors").exists()
