"""The angle of rotary pairs is found in every notation, only where it is free, and alignment recovers it."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.core.element import PARTS, Element, Value
from regauge.discovery.activations import activations
from regauge.nets.transformer import Llama, initialize_transformer


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def angles(tokens: int, pairs: int) -> Tensor:
    return torch.arange(tokens).unsqueeze(-1) * 10.0 ** (-torch.arange(pairs) / pairs)


def halves(x: Tensor) -> Tensor:
    """Compute `x cos + rotate_half(x) sin`."""
    half = x.shape[-1] // 2
    turn = torch.cat([angles(x.shape[-2], half)] * 2, -1)
    return x * turn.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * turn.sin()


def neighbors(x: Tensor) -> Tensor:
    """Rotate pairs of even and odd entries, by slices with a step."""
    turn = angles(x.shape[-2], x.shape[-1] // 2).repeat_interleave(2, -1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * turn.cos() + turned * turn.sin()


def unbound(x: Tensor) -> Tensor:
    """Rotate pairs of even and odd entries, by separating the pairs."""
    turn = angles(x.shape[-2], x.shape[-1] // 2)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    parts = real * turn.cos() - imaginary * turn.sin(), imaginary * turn.cos() + real * turn.sin()
    return torch.stack(parts, -1).flatten(-2)


def numbers(x: Tensor) -> Tensor:
    """Rotate pairs by complex multiplication."""
    turn = angles(x.shape[-2], x.shape[-1] // 2)
    unit = torch.polar(torch.ones_like(turn), turn)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * unit).flatten(-2)


def partial(x: Tensor) -> Tensor:
    """Rotate only the first half of the entries."""
    half = x.shape[-1] // 2
    return torch.cat([halves(x[..., :half]), x[..., half:]], -1)


def empty_rest(x: Tensor) -> Tensor:
    """Rotate all entries, and append a rest without entries, as in Phi-3."""
    return torch.cat([halves(x[..., : x.shape[-1]]), x[..., x.shape[-1] :]], -1)


def decaying(x: Tensor) -> Tensor:
    """Rotate and shrink with the position, which is still a complex multiplication."""
    return halves(x) * torch.exp(-0.1 * torch.arange(x.shape[-2])).unsqueeze(-1)


def two_frequencies(x: Tensor) -> Tensor:
    """Rotate the two entries of a pair with different frequencies."""
    turn, half = angles(x.shape[-2], x.shape[-1]), x.shape[-1] // 2
    return x * turn.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * turn.sin()


def mirrored(x: Tensor) -> Tensor:
    """Reflect instead of rotating: angles of queries and keys have opposite signs, and their products do not change."""
    half = x.shape[-1] // 2
    turn = torch.cat([angles(x.shape[-2], half)] * 2, -1)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first, -second], -1) * turn.cos() + torch.cat([second, first], -1) * turn.sin()


def gained(x: Tensor) -> Tensor:
    """Multiply the rotated entries by fixed gains, which destroys the symmetry of the plane."""
    return halves(x) * torch.linspace(1, 2, x.shape[-1])


class Attention(nn.Module):
    """Attention with positions of any kind. Several queries may share keys and values."""

    def __init__(self, position: Callable[[Tensor], Tensor], heads: int = 2, shared: int = 1, size: int = 4) -> None:
        super().__init__()
        self.position, self.size, self.shared = position, size, shared
        self.query, self.out = nn.Linear(6, heads * shared * size), nn.Linear(heads * shared * size, 6)
        self.key, self.value = nn.Linear(6, heads * size), nn.Linear(6, heads * size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = self.position(q), self.position(k)
        k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        result: Tensor = self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))
        return result


def turned(symmetry: rg.Symmetry) -> list[rg.Group]:
    return [group for group in symmetry.groups if group.kind == "rotation"]


def found(module: nn.Module, tokens: int = 5, **options: bool) -> rg.Symmetry:
    return rg.discover(module, (torch.randn(2, tokens, 6, generator=generator(0)),), **options)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("position", [halves, neighbors, unbound, numbers, partial, empty_rest, decaying, mirrored])
def test_every_way_to_write_it_gives_an_angle_for_each_pair(position: Callable[[Tensor], Tensor], shared: int) -> None:
    size = 8 if position is partial else 4
    symmetry = found(Attention(position, shared=shared, size=size), verify=False)
    (group,) = turned(symmetry)
    copies = math.prod(symmetry[base].size for base in group.within)
    assert (group.size, copies) == (2, 2 * 2)  # Heads of keys, pairs of each.
    assert {p.parameter for p in group.placements} == {"query.weight", "query.bias", "key.weight", "key.bias"}
    pairs = symmetry[group.within[-1]]
    assert (pairs.size, pairs.scales, pairs.signs, pairs.is_permuted) == (2, 1, 0, False)
    inputs = (torch.randn(2, 5, 6, generator=generator(1)),)
    check = symmetry.verify(Attention(position, shared=shared, size=size), inputs, generator=generator(2))
    assert check.ok, str(check)


def test_a_head_may_be_a_single_pair() -> None:
    (group,) = turned(symmetry := found(Attention(halves, size=2)))
    assert [symmetry[base].size for base in group.within] == [2, 1]


def test_heads_may_be_an_axis_of_their_own() -> None:
    class Separate(nn.Module):
        """Projections with shape `[head, entry, in]`."""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Parameter(torch.randn(3, 4, 6)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("bti,hdi->bhtd", x, w) for w in (self.query, self.key, self.value))
            scores = halves(q) @ halves(k).mT
            return torch.einsum("bhtd,hdi->bti", torch.softmax(scores, -1) @ v, self.out)

    (group,) = turned(symmetry := found(Separate()))
    assert [symmetry[base].size for base in group.within] == [3, 2]


@pytest.mark.parametrize("position", [two_frequencies, gained, lambda x: x])
def test_turns_that_do_not_commute_have_no_angle(position: Callable[[Tensor], Tensor]) -> None:
    symmetry = found(Attention(position), verify=False)
    assert not turned(symmetry)
    assert symmetry.groups


def test_one_position_cannot_tell_turns_from_gains() -> None:
    """With a single token, all operators are the identity for this shape. With two tokens, they are not."""
    assert not turned(found(Attention(two_frequencies), tokens=2, verify=False))


def test_an_angle_by_hand_is_refused_by_the_check() -> None:
    """The law of the angles holds only for these positions: the same groups fail with other positions."""
    symmetry = found(Attention(halves))
    inputs = (torch.randn(2, 5, 6, generator=generator(1)),)
    check = symmetry.verify(Attention(two_frequencies), inputs, generator=generator(2))
    assert check.failed == (turned(symmetry)[0].name,)


def test_tables_and_constants_without_values_are_as_good_as_any() -> None:
    class Table(nn.Module):
        """Frequencies in a buffer, as in transformers."""

        frequencies: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", angles(2, 2)[1], persistent=False)
            self.attention = Attention(self.position)

        def position(self, x: Tensor) -> Tensor:
            turn = torch.cat([torch.arange(x.shape[-2], device=x.device).unsqueeze(-1) * self.frequencies] * 2, -1)
            return x * turn.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * turn.sin()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.attention(x)
            return result

    with torch.device("meta"):
        unknown = Table()
    assert [len(turned(found(module, verify=False))) for module in (Table(), unknown)] == [1, 1]


def test_with_the_angles_discovery_is_complete() -> None:
    """Groups and translations span all directions that do not change the function. Without the angles, each angle is
    missing.
    """
    module, inputs = Attention(halves).double(), (torch.randn(3, 5, 6, generator=generator(0)).double(),)
    symmetry = rg.discover(module, inputs)
    (group,) = turned(symmetry)
    without = replace(symmetry, groups=tuple(g for g in symmetry.groups if g is not group))
    unexplained = [
        rg.discovery.nullity(module, inputs, symmetry=one, generator=generator(1)).unexplained
        for one in (symmetry, without)
    ]
    assert unexplained == [0, 4]


def tiny() -> tuple[Llama, rg.Symmetry, rg.Params]:
    module = Llama(11, width=16, layers=1, heads=4, kv_heads=2).double()
    symmetry = rg.discover(module, (torch.randint(0, 11, (2, 6), generator=generator(0)),))
    params = {name: t.double() for name, t in initialize_transformer(module, generator(1)).items()}
    return module, symmetry, params


def test_planted_angles_and_heads_are_recovered_behind_balanced_scales() -> None:
    _, symmetry, a = tiny()
    (group,) = turned(symmetry)
    planted = symmetry.random(generator(2), PARTS)  # Kept scales match networks as they are.
    blank = symmetry.identity()
    for other in symmetry.groups:
        if other.matrix == "linear":
            planted = planted.replace(other.name, blank[other.name])
    b = symmetry.act(planted, a)
    first, second = (rg.canonicalize(params, symmetry, parts=("scale",)) for params in (a, b))
    result = rg.align(first, second, symmetry, method=rg.WeightMatching(scales="keep"))
    assert max(float((result.params[name] - first[name]).abs().max()) for name in a) < 1e-7
    # Without the angles, which are a group of their own, alignment ends far from there.
    fixed = rg.Symmetry(tuple(g for g in symmetry.groups if g is not group), symmetry.shapes)
    worse = rg.align(first, second, fixed, method=rg.WeightMatching(scales="keep"))
    assert max(float((worse.params[name] - first[name]).abs().max()) for name in a) > 0.1


def test_canonical_networks_forget_their_angles() -> None:
    _, symmetry, a = tiny()
    b = symmetry.act(symmetry.random(generator(3)), a)
    first, second = (rg.canonicalize(params, symmetry) for params in (a, b))
    assert all(torch.allclose(first[name], second[name], atol=1e-9) for name in a)


def test_half_a_turn_is_the_sign_and_a_full_turn_is_nothing() -> None:
    _, symmetry, a = tiny()
    (group,) = turned(symmetry)
    blank = symmetry.identity()
    matrix = blank[group.name].matrix
    assert matrix is not None
    half = blank.replace(group.name, Value(matrix=-matrix))
    moved = symmetry.act(half, a)
    for name in ("query", "key"):
        weight = f"blocks.0.attention.{name}.weight"
        assert torch.equal(moved[weight], -a[weight])
    assert isinstance(half, Element)
    back = symmetry.act(symmetry.compose(half, half), a)
    assert all(torch.equal(back[name], a[name]) for name in a)


def test_activations_turn_with_their_parameters() -> None:
    module, symmetry, _ = tiny()
    inputs = (torch.randint(0, 11, (2, 6), generator=generator(4)),)
    seen = activations(module, inputs, symmetry)
    (group,) = turned(symmetry)
    places = {p.parameter for p in seen.symmetry[group.name].placements}
    assert {"%linear", "%linear_1"} <= places
    assert not any("left out" in note for note in seen.notes)
