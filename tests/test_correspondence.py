"""Correspondences between different widths preserve functions if units are copies, and have permutations as their
limit.
"""

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
from coverings import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from symmetries import BY_HAND, drawn, generator, mlp_symmetry
from torch import Tensor, nn

import regauge as rg
from regauge import Params, Symmetry


def inner_product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a)


def split_units(params: Params, symmetry: Symmetry, copies: int, wide: Symmetry, seed: int) -> Params:
    """Split every unit of an MLP into several copies that divide its outgoing weights, in a random order."""
    result = dict(params)
    for name, sites in symmetry.sites.items():
        tensor = params[name]
        for site in sites:
            axis = site.placement.axis
            tensor = tensor.repeat_interleave(copies, axis) / (copies if axis else 1)
        result[name] = tensor
    return wide.act(wide.random(generator(seed), ("permutation", "sign")), result)


def is_close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], atol: float = 1e-9) -> bool:
    return all(torch.allclose(a[name], b[name], atol=atol) for name in a)


# --- equal widths ----------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=12)
@given(kind=st.sampled_from(["permutation", "signed", "scaled"]), n=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_equal_widths_recover_the_planted_element_exactly(kind: str, n: int, seed: int) -> None:
    symmetry = mlp_symmetry(3, n, 2, kind=kind)
    a = drawn(symmetry, seed)
    planted = symmetry.random(generator(seed), ("permutation", "sign"))
    b = symmetry.act(planted, a)
    found = rg.alignment.correspond(a, b, symmetry, symmetry)
    assert all(torch.equal(tensor, a[name]) for name, tensor in found.apply(b).items())
    assert torch.equal(found.hard["h1"], symmetry.inverse(planted)["h1"].perm)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["permutation", "signed"])
def test_equal_widths_of_one_layer_are_weight_matching(kind: str) -> None:
    symmetry = mlp_symmetry(4, 20, 3, kind=kind)
    for seed in range(5):
        a, b = drawn(symmetry, seed), drawn(symmetry, seed + 100)
        found, matched = rg.alignment.correspond(a, b, symmetry, symmetry), rg.align(a, b, symmetry)
        assert found.objective == pytest.approx(matched.objective)
        assert found.initial == pytest.approx(matched.initial)
        assert all(torch.equal(tensor, matched.params[name]) for name, tensor in found.apply(b).items())


@pytest.mark.parametrize("kind", ["permutation", "signed"])
def test_the_permutation_is_the_limit_of_soft_plans(kind: str) -> None:
    """With two hidden layers and noise, less regularization gives a plan closer to the permutation of weight
    matching.
    """
    symmetry = mlp_symmetry(8, 10, 9, 6, kind=kind)
    a, noise = drawn(symmetry, 0), drawn(symmetry, 1)
    planted = symmetry.random(generator(2), ("permutation", "sign"))
    b = {name: tensor + 0.1 * noise[name] for name, tensor in symmetry.act(planted, a).items()}
    matched = rg.align(a, b, symmetry)
    away = []
    for regularization in (0.3, 0.1, 0.03, 0.02, 0.0):
        found = rg.alignment.correspond(a, b, symmetry, symmetry, regularization=regularization)
        assert all(torch.equal(found.hard[name], matched.element[name].perm) for name in found.hard)  # type: ignore[arg-type]
        moved = found.apply(b)
        away.append(max(float((tensor - matched.params[n]).norm()) for n, tensor in moved.items()))
    assert all(x > y for x, y in itertools.pairwise(away))
    assert away[-2] < 1e-4
    assert away[-1] == 0


# --- copies ----------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    kind=st.sampled_from(["permutation", "signed"]), n=st.integers(1, 9), k=st.integers(2, 4), seed=st.integers(0, 999)
)
def test_copies_are_joined_and_units_are_copied(kind: str, n: int, k: int, seed: int) -> None:
    small, wide = mlp_symmetry(3, n, 2, kind=kind), mlp_symmetry(3, k * n, 2, kind=kind)
    a = drawn(small, seed)
    b = split_units(a, small, k, wide, seed)
    assert is_close(rg.alignment.correspond(a, b, small, wide).apply(b), a)
    assert is_close(rg.alignment.correspond(b, a, wide, small).apply(a), b)


@pytest.mark.parametrize("kind", ["permutation", "signed"])
def test_copies_in_deep_networks(kind: str) -> None:
    small, wide = mlp_symmetry(9, 8, 7, 6, 5, kind=kind), mlp_symmetry(9, 16, 14, 12, 5, kind=kind)
    a = drawn(small, 0)
    b = split_units(a, small, 2, wide, 1)
    assert is_close(rg.alignment.correspond(a, b, small, wide).apply(b), a)
    assert is_close(rg.alignment.correspond(b, a, wide, small).apply(a), b)


class Dense(nn.Module):
    """Convolutions with batch normalization, whose outputs are concatenated, flattened and read by a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.depthwise = nn.Conv2d(3 * width, 3 * width, 3, groups=3 * width)
        self.last = nn.Linear(3 * width * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.norm(self.first(x)))
        x = torch.cat([x, torch.nn.functional.gelu(self.second(x))], 1)
        logits: Tensor = self.last(torch.nn.functional.gelu(self.depthwise(x)).flatten(1))
        return logits


class Upsampling(nn.Module):
    """Transposed convolutions after an embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(5, width)
        self.up = nn.ConvTranspose2d(width, 2 * width, 2)
        self.last = nn.ConvTranspose2d(2 * width, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.table(x))
        images: Tensor = self.last(torch.nn.functional.gelu(self.up(x[:, :, None, None])))
        return images


class Residual(nn.Module):
    """A stream that a block reads and writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.up = nn.Linear(3, width), nn.Linear(width, 2 * width)
        self.down, self.last = nn.Linear(2 * width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        x = x + self.down(torch.tanh(self.up(torch.relu(x))))
        logits: Tensor = self.last(torch.relu(x))
        return logits


INPUTS: dict[Callable[[int], nn.Module], Callable[[], Tensor]] = {
    Dense: lambda: torch.randn(2, 2, 4, 4, generator=generator(0)),
    Upsampling: lambda: torch.tensor([0, 3]),
    Residual: lambda: torch.randn(4, 3, generator=generator(0)),
}


@pytest.mark.parametrize("build", INPUTS)
@pytest.mark.parametrize("widths", [(6, 2), (3, 3)], ids=str)
def test_a_wider_network_can_compute_what_a_narrow_one_does(
    build: Callable[[int], nn.Module], widths: tuple[int, int]
) -> None:
    """For any A: if its width is an integer multiple of B's width, every unit of A corresponds to one unit of B."""
    inputs, states, symmetries, modules = INPUTS[build](), [], [], []
    for seed, width in enumerate(widths):
        module = build(width).double().eval()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        symmetries.append(rg.discover(module, (inputs,), verify=False))
        g = generator(seed)
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=g, dtype=torch.float64) + 0.1)
        modules.append(module)
        states.append(dict(module.state_dict()))
    found = rg.alignment.correspond(states[0], states[1], symmetries[0], symmetries[1])
    mapped = found.apply(states[1])
    assert {n: t.shape for n, t in mapped.items()} == {n: t.shape for n, t in states[0].items()}
    expected = modules[1](inputs)
    assert torch.allclose(torch.func.functional_call(modules[0], mapped, (inputs,)), expected, rtol=1e-9)


# --- laws ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("widths", "kind", "plans"),
    covering(["6 to 3", "3 to 6", "5 to 7", "4 to 4"], ["permutation", "signed", "dihedral"], ["hard", "soft"], of=1),
)
def test_it_never_falls_and_reports_what_it_reaches(widths: str, kind: str, plans: str) -> None:
    first, second = (int(width) for width in widths.split(" to "))
    regularization = 0.05 if plans == "soft" else 0.0
    symmetry_a = mlp_symmetry(4, first, 5, 2, kind=kind)
    symmetry_b = mlp_symmetry(4, second, 6, 2, kind=kind)
    for seed in range(2):
        a, b = drawn(symmetry_a, seed), drawn(symmetry_b, seed + 100)
        kept = {name: tensor.clone() for name, tensor in b.items()}
        found = rg.alignment.correspond(a, b, symmetry_a, symmetry_b, regularization=regularization)
        mapped = found.apply(b)
        assert all(torch.equal(b[name], kept[name]) for name in b)
        assert all(tensor.shape == a[name].shape for name, tensor in mapped.items())
        assert found.is_converged
        assert found.objective >= found.initial
        assert all(x <= y for x, y in itertools.pairwise(found.history))
        for plan in found.plans.values():
            n, m = plan.mass.shape
            assert torch.allclose(plan.mass.sum(1), torch.full((n,), 1 / n).double())
            assert torch.allclose(plan.mass.sum(0), torch.full((m,), 1 / m).double())
        if not regularization:
            assert found.objective == pytest.approx(inner_product(a, mapped))


def test_the_objective_is_the_transport_cost() -> None:
    """With fixed masses, the sum of squared distances of all pairs of weights differs from the objective by a
    constant.
    """
    symmetry_a, symmetry_b = mlp_symmetry(3, 4, 5, 2), mlp_symmetry(3, 6, 3, 2)
    a, b = drawn(symmetry_a, 0), drawn(symmetry_b, 1)

    def cost(masses: dict[str, Tensor]) -> float:
        """Return the cost, where B's weights count per unit of mass that they read."""
        total = 0.0
        for name, (out, read) in {"0.weight": ("h1", None), "1.weight": ("h2", "h1"), "2.weight": (None, "h2")}.items():
            x, y = a[name], b[name]
            rows = masses[out] if out else torch.eye(x.shape[0]).double() / x.shape[0]
            columns = masses[read] if read else torch.eye(x.shape[1]).double() / x.shape[1]
            ratio = columns.shape[1] / columns.shape[0]
            squares = (x[:, None, :, None] - ratio * y[None, :, None, :]).square()
            total += x.numel() * float(torch.einsum("ij,kl,ijkl->", rows, columns, squares))
        for name, group in {"0.bias": "h1", "1.bias": "h2"}.items():
            squares = (a[name][:, None] - b[name]).square()
            total += len(a[name]) * float((masses[group] * squares).sum())
        return total

    soft = rg.alignment.correspond(a, b, symmetry_a, symmetry_b, max_sweeps=1, regularization=0.5)
    hard = rg.alignment.correspond(a, b, symmetry_a, symmetry_b)
    costs = [cost({name: plan.mass for name, plan in found.plans.items()}) for found in (soft, hard)]
    reached = [inner_product(a, found.apply(b)) for found in (soft, hard)]
    assert costs[0] - costs[1] == pytest.approx(2 * (reached[1] - reached[0]))
    assert reached[1] > reached[0]


@pytest.mark.parametrize("regularization", [0.0, 0.05])
def test_moving_the_second_network_first_changes_nothing(regularization: float) -> None:
    symmetry_a, symmetry_b = mlp_symmetry(4, 9, 3, kind="signed"), mlp_symmetry(4, 6, 3, kind="signed")
    for seed in range(5):
        a, b = drawn(symmetry_a, seed), drawn(symmetry_b, seed + 1)
        moved = symmetry_b.act(symmetry_b.random(generator(seed)), b)
        results = [
            rg.alignment.correspond(a, other, symmetry_a, symmetry_b, regularization=regularization).apply(other)
            for other in (b, moved)
        ]
        assert is_close(results[0], results[1], atol=1e-6)


def test_a_recurrent_layer_is_improved_until_nothing_gains() -> None:
    """One group acts on both axes of a tensor. The objective is quadratic, and only improvements are accepted."""
    symmetry = BY_HAND["recurrent"]
    for seed in range(3):
        a, b = drawn(symmetry, seed), drawn(symmetry, seed + 100)
        found = rg.alignment.correspond(a, b, symmetry, symmetry)
        assert found.objective >= found.initial
        assert found.objective == pytest.approx(inner_product(a, found.apply(b)))


def test_pairs_in_order_are_the_start_where_it_would_be_lost() -> None:
    """The networks are already close, and nothing anchors the group."""
    symmetry = mlp_symmetry(1, 12, 12, 12, 1, kind="signed")
    a, noise = drawn(symmetry, 4), drawn(symmetry, 5)
    b = {name: tensor + 0.5 * noise[name] for name, tensor in a.items()}
    found = rg.alignment.correspond(a, b, symmetry, symmetry)
    assert found.objective >= found.initial == pytest.approx(inner_product(a, b))


# --- what counts, and what is refused --------------------------------------------------------------------------


def test_buffers_are_mapped_but_do_not_count() -> None:
    axes = {"w": ("h", None), "v": (None, "h"), "mean": ("h",), "seen": ()}
    symmetry = Symmetry.from_axes(axes, buffers=["mean"])
    a = {"w": torch.randn(3, 4, generator=generator(0)), "v": torch.randn(2, 3, generator=generator(1))}
    order = torch.tensor([2, 0, 1, 1, 2, 0])
    b = {"w": a["w"][order], "v": a["v"][:, order] / 2, "mean": order.float(), "seen": torch.tensor(5)}
    a |= {"mean": 1000 * torch.tensor([3.0, 1.0, 2.0]), "seen": torch.tensor(7)}
    mapped = rg.alignment.correspond(a, b, symmetry, symmetry).apply(b)
    assert torch.equal(mapped["mean"], torch.tensor([0.0, 1.0, 2.0]))
    assert int(mapped["seen"]) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept(dtype: torch.dtype) -> None:
    small, wide = mlp_symmetry(20, 8, 5), mlp_symmetry(20, 16, 5)
    a = drawn(small, 0, dtype)
    b = split_units(a, small, 2, wide, 1)
    mapped = rg.alignment.correspond(a, b, small, wide).apply(b)
    assert all(t.dtype == dtype and torch.equal(t, a[n]) for n, t in mapped.items())


def refused(symmetry_a: Symmetry, symmetry_b: Symmetry, **how: object) -> None:
    rg.alignment.correspond(drawn(symmetry_a, 0), drawn(symmetry_b, 1), symmetry_a, symmetry_b, **how)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    plain = mlp_symmetry(2, 3, 2)
    with pytest.raises(ValueError, match=r"group 'h1' is orthogonal, so it has no single units"):
        refused(mlp_symmetry(2, 3, 2, kind="orthogonal"), mlp_symmetry(2, 4, 2, kind="orthogonal"))
    with pytest.raises(ValueError, match=r"group 'e' has other groups repeated within it"):
        refused(BY_HAND["experts"], BY_HAND["experts"])
    with pytest.raises(ValueError, match=r"only the second has '2.bias', '2.weight'"):
        refused(plain, mlp_symmetry(2, 3, 3, 2))
    with pytest.raises(ValueError, match=r"group 'h1' has kind permutation in the first network and signed"):
        refused(plain, mlp_symmetry(2, 3, 2, kind="signed"))
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(3, 2\) .* and \(3, 5\) in the second"):
        refused(plain, mlp_symmetry(5, 3, 2))
    renamed = Symmetry.from_axes(
        {"0.weight": ("x", None), "0.bias": ("x",), "1.weight": (None, "x"), "1.bias": (None,)}
    )
    with pytest.raises(ValueError, match=r"first network are \['h1'\], but those of the second are \['x'\]"):
        rg.alignment.correspond(drawn(plain, 0), drawn(plain, 0), plain, renamed)
    fewer = Symmetry.from_axes(
        {"0.weight": ("h1", None), "1.weight": (None, "h1"), "0.bias": (None,), "1.bias": (None,)}
    )
    with pytest.raises(ValueError, match=r"group 'h1' acts differently in both networks"):
        rg.alignment.correspond(drawn(plain, 0), drawn(plain, 0), plain, fewer)
    bad = drawn(plain, 0)
    with pytest.raises(ValueError, match=r"'0.weight' of the second network holds NaN or Inf in 6 of"):
        rg.alignment.correspond(bad, {**bad, "0.weight": bad["0.weight"] * float("nan")}, plain, plain)
    with pytest.raises(ValueError, match=r"regularization=-1"):
        refused(plain, plain, regularization=-1)


def test_readers_can_be_named() -> None:
    """Weights are written as (in, out), with the axes in reverse order."""
    axes = {"w": (None, "h"), "b": ("h",), "v": ("h", None)}
    sized = {"w": torch.ones(3, 2), "b": torch.ones(2), "v": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=r"readers \[\('w', 0\)\] are no axes on which a group acts"):
        rg.alignment.correspond(sized, sized, Symmetry.from_axes(axes), Symmetry.from_axes(axes), readers=[("w", 0)])
    small = Symmetry.from_axes(axes).bind({"w": torch.ones(3, 2), "b": torch.ones(2), "v": torch.ones(2, 4)})
    wide = Symmetry.from_axes(axes).bind({"w": torch.ones(3, 4), "b": torch.ones(4), "v": torch.ones(4, 4)})
    a, b = drawn(wide, 0), drawn(small, 1)
    mapped = rg.alignment.correspond(a, b, wide, small, readers=[("v", 0)]).apply(b)
    x = drawn(mlp_symmetry(3, 5, 2), 0)["0.weight"]
    expected = torch.tanh(x @ b["w"] + b["b"]) @ b["v"]
    assert torch.allclose(torch.tanh(x @ mapped["w"] + mapped["b"]) @ mapped["v"], expected)
    no_reader = Symmetry.from_axes({"b": ("h",)})
    with pytest.raises(ValueError, match="none of the axes of group 'h' sums over its units; name the axes"):
        rg.alignment.correspond({"b": torch.ones(3)}, {"b": torch.ones(2)}, no_reader, no_reader)


def test_a_correspondence_maps_one_network_of_its_shapes() -> None:
    small, wide = mlp_symmetry(2, 3, 2), mlp_symmetry(2, 6, 2)
    found = rg.alignment.correspond(drawn(small, 0), drawn(wide, 1), small, wide)
    with pytest.raises(ValueError, match="the parameters are of another architecture"):
        found.apply(drawn(small, 0))
    with pytest.raises(ValueError, match="this is a population"):
        found.apply({name: tensor.expand(2, *tensor.shape) for name, tensor in drawn(wide, 1).items()})
    with pytest.raises(ValueError, match=r"torch.int64, but group .* acts on it"):
        found.apply({name: tensor.long() for name, tensor in drawn(wide, 1).items()})
    assert found.hard == {}
