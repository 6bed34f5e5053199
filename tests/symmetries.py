"""Explicitly written symmetries of every kind, with networks."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import regauge as rg
from regauge import Element, Group, Params, Placement, Symmetry, Value
from regauge.core.balance import balance_alike, has_balance

KINDS = ["permutation", "scaled", "signed", "dihedral", "orthogonal", "centered", "rotation", "linear"]
PARTS = {
    "dihedral": ("permutation", "sign", "shift"),
    "orthogonal": ("linear",),
    "centered": ("linear",),
    "rotation": ("linear",),
    "linear": (),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp_symmetry(*widths: int, kind: str = "permutation") -> Symmetry:
    axes: dict[str, tuple[str | None, ...]] = {}
    last = len(widths) - 2
    for k in range(last + 1):
        out = f"h{k + 1}" if k < last else None
        axes[f"{k}.weight"] = (out, f"h{k}" if k else None)
        axes[f"{k}.bias"] = (out,)
    bound = Symmetry.from_axes(axes, kinds={f"h{k}": kind for k in range(1, last + 1)})  # type: ignore[misc]
    return bound.bind({n: torch.zeros(s) for n, s in mlp_shapes(*widths).items()})


def mlp_shapes(*widths: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for k, (before, after) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"{k}.weight": (after, before), f"{k}.bias": (after,)}
    return shapes


def drawn(symmetry: Symmetry, seed: int, dtype: torch.dtype = torch.float64) -> Params:
    g = generator(seed)
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for n, s in symmetry.shapes.items()}


def closeness(symmetry: Symmetry, a: Params, moved: Params, b: Params) -> float:
    """Return the objective by its definition, for the stored networks, or for balanced networks if balancing is
    possible.
    """
    if has_balance(symmetry):
        left, right = (found.element for found in balance_alike([a, b], symmetry))
        a, moved, b = symmetry.act(left, a), symmetry.act(left, moved), symmetry.act(right, b)
    total = 0.0
    for name in symmetry.sites:
        x, y, z = a[name].double(), moved[name].double(), b[name].double()
        total += float((x * y).sum() - (y.square().sum() - z.square().sum()) / 2)
    return total


def experts(count: int, units: int, features: int, signs: int = 0) -> Symmetry:
    """Return a symmetry of experts that can be permuted, each with separate hidden units."""
    exponents = (1,) * signs
    base = Group("e", count, tuple(Placement(n, 0) for n in ("w1", "w2", "router")), is_base=True)
    inner = Group("i", units, (Placement("w1", 1, sign=exponents), Placement("w2", 2, sign=exponents)), signs=signs)
    inner = Group("i", units, inner.placements, signs=signs, within=("e",))
    shapes = {"w1": (count, units, features), "w2": (count, features, units), "router": (count, features)}
    return Symmetry((base, inner), shapes)


def normalized_groups(count: int, channels: int, features: int) -> Symmetry:
    """Return the symmetry of a group normalization followed by an odd function: a permutation and a sign of whole
    groups, and channels.
    """
    block = {"stride": channels, "repeats": ((channels, 1),)}
    base = Group(
        "g",
        count,
        (
            Placement("w", 0, sign=(1,), **block),  # type: ignore[arg-type]
            Placement("gain", 0, sign=(0,), **block),  # type: ignore[arg-type]
            Placement("v", 1, sign=(1,), **block),  # type: ignore[arg-type]
        ),
        signs=1,
        is_base=True,
    )
    repeats = ((count, channels),)
    places = tuple(Placement(n, axis, repeats=repeats) for n, axis in (("w", 0), ("gain", 0), ("v", 1)))
    inner = Group("c", channels, places, within=("g",))
    width = count * channels
    return Symmetry((base, inner), {"w": (width, features), "gain": (width,), "v": (3, width)})


def three_levels() -> Symmetry:
    """Return a symmetry with blocks of blocks of units."""
    outer = Group("e", 2, (Placement("w", 0), Placement("z", 0)), is_base=True)
    middle = Group("s", 2, (Placement("w", 1),), is_base=True, within=("e",))
    inner = Group("x", 2, (Placement("w", 2),), within=("e", "s"))
    return Symmetry((outer, middle, inner), {"w": (2, 2, 2, 3), "z": (2, 3)})


def attention(heads: int, dim: int, features: int) -> Symmetry:
    """Return a symmetry of heads that can be permuted, each with a rotation of queries and keys and a rotation of
    values.
    """
    block = {"stride": dim, "repeats": ((dim, 1),)}
    places = tuple(Placement(n, int(n == "o"), **block) for n in ("q", "k", "v", "o"))  # type: ignore[arg-type]
    base = Group("heads", heads, places, is_base=True)
    copies = ((heads, dim),)

    def rotation(name: str, left: Placement, right: Placement) -> Group:
        return Group(name, dim, (left, right), is_permuted=False, matrix="orthogonal", within=("heads",))

    qk = rotation("qk", Placement("q", 0, repeats=copies), Placement("k", 0, repeats=copies, is_inverse=True))
    vo = rotation("vo", Placement("v", 0, repeats=copies), Placement("o", 1, repeats=copies, is_inverse=True))
    width = heads * dim
    shapes = {"q": (width, features), "k": (width, features), "v": (width, features), "o": (features, width)}
    return Symmetry((base, qk, vo), shapes)


def rotary(heads: int, pairs: int, features: int) -> Symmetry:
    """Return a symmetry of heads that can be permuted, each with an angle for each pair of coordinates of queries and
    keys.
    """
    width = 2 * heads * pairs
    block = {"stride": 2 * pairs, "repeats": ((2 * pairs, 1),)}
    base = Group("heads", heads, tuple(Placement(n, 0, **block) for n in ("q", "k", "v")), is_base=True)  # type: ignore[arg-type]
    units = tuple(Placement(n, 0, repeats=((2, pairs), (heads, 2 * pairs))) for n in ("q", "k"))
    within = Group("pairs", pairs, units, is_permuted=False, within=("heads",), is_base=True)
    turns = tuple(Placement(n, 0, stride=pairs, repeats=((pairs, 1), (heads, 2 * pairs))) for n in ("q", "k"))
    angles = Group(
        "angles", 2, turns, is_permuted=False, matrix="orthogonal", is_proper=True, within=("heads", "pairs")
    )
    return Symmetry((base, within, angles), dict.fromkeys(("q", "k", "v"), (width, features)))


def grouped_convolution(count: int, before: int, after: int, features: int) -> Symmetry:
    """Return a symmetry with two inner groups on one tensor, within one permutation of blocks. The assignment of blocks
    is not exact.
    """
    own, out = {"stride": before, "repeats": ((before, 1),)}, {"stride": after, "repeats": ((after, 1),)}
    base = Group(
        "g",
        count,
        (Placement("w0", 0, **own), Placement("w", 0, **out), Placement("w2", 1, **out)),  # type: ignore[arg-type]
        is_base=True,
    )
    inner = Group("i", before, (Placement("w0", 0, repeats=((count, before),)), Placement("w", 1)), within=("g",))
    places = (Placement("w", 0, repeats=((count, after),)), Placement("w2", 1, repeats=((count, after),)))
    outer = Group("o", after, places, within=("g",))
    shapes = {"w0": (count * before, features), "w": (count * after, before, 3), "w2": (4, count * after)}
    return Symmetry((base, inner, outer), shapes)


def recurrent(units: int) -> Symmetry:
    """Return a symmetry with one group on both axes of a tensor, so the objective is quadratic in the group."""
    return Symmetry.from_axes({"ih": ("h", None), "hh": ("h", "h"), "out": (None, "h")}).bind(
        {"ih": torch.zeros(units, 5), "hh": torch.zeros(units, units), "out": torch.zeros(2, units)}
    )


def stream(width: int, hidden: int, blocks: int) -> Symmetry:
    """Return a symmetry of a residual stream with weak anchors at its ends, and with blocks that read and write it."""
    axes: dict[str, tuple[str | None, ...]] = {"in": ("s", None), "out": (None, "s")}
    sizes: dict[str, tuple[int, ...]] = {"in": (width, 3), "out": (3, width)}
    for k in range(blocks):
        axes |= {f"{k}.up": (f"h{k}", "s"), f"{k}.down": ("s", f"h{k}")}
        sizes |= {f"{k}.up": (hidden, width), f"{k}.down": (width, hidden)}
    return Symmetry.from_axes(axes).bind({n: torch.zeros(s) for n, s in sizes.items()})


def gated_branch(units: int, width: int) -> Symmetry:
    """Return a symmetry of a branch whose outputs are multiplied by a parameter without axes."""
    hidden = Group("h", units, (Placement("up", 0), Placement("down", 1)))
    writes = Placement("down", 0, repeats=((width, 1),), scale=(-1,))
    gate = Group("gate", 1, (Placement("gate", 0, scale=(1,)), writes), is_permuted=False, scales=1)
    return Symmetry((hidden, gate), {"up": (units, width), "down": (width, units), "gate": ()})


BY_HAND = {
    **{kind: mlp_symmetry(4, 9, 7, 3, kind=kind) for kind in KINDS[:4]},
    **{kind: mlp_symmetry(6, 5, 4, 6, kind=kind) for kind in KINDS[4:]},
    "experts": experts(3, 5, 6),
    "signed experts": experts(3, 5, 6, signs=1),
    "normalized groups": normalized_groups(3, 4, 6),
    "three levels": three_levels(),
    "attention": attention(3, 4, 10),
    "rotary": rotary(3, 2, 5),
    "grouped convolution": grouped_convolution(3, 2, 4, 5),
    "recurrent": recurrent(8),
    "stream": stream(6, 9, 3),
    "gated branch": gated_branch(7, 5),
}
WIDE = mlp_symmetry(4, 9, 7, 3, kind="linear")
"""Layers with more units than inputs and outputs. Weights determine no matrix for such layers, so they are only
rotated."""


def every_element(symmetry: Symmetry) -> Iterator[Element]:
    """Return all permutations and signs of a small symmetry."""
    sizes = {group.name: group.size for group in symmetry.groups}
    choices: list[list[tuple[str, Value]]] = []
    for group in symmetry.groups:
        lead = tuple(sizes[base] for base in group.within)
        copies = torch.Size(lead).numel()
        perms = [list(range(group.size))]
        if group.is_permuted:
            perms = [list(p) for p in itertools.permutations(range(group.size))]
        signs = list(itertools.product((1, -1), repeat=group.signs * group.size * copies))
        options = []
        for chosen in itertools.product(perms, repeat=copies):
            for sign in signs:
                perm = torch.tensor(chosen).reshape(*lead, group.size)
                value = torch.tensor(sign, dtype=torch.int8).reshape(*lead, group.signs, group.size)
                options.append((group.name, Value(perm, sign=value if group.signs else None)))
        choices.append(options)
    for combination in itertools.product(*choices):
        yield Element(dict(combination))


def one_kind(kind: str, n: int) -> tuple[rg.Symmetry, dict[str, tuple[int, ...]]]:
    """Return an explicit symmetry of two layers and a flattened axis."""
    axes = {"w1": ("h", None), "b1": ("h",), "w2": (None, "h"), "wide": ("h^-1", "h*3"), "free": (None,)}
    shapes = {"w1": (n, 5), "b1": (n,), "w2": (4, n), "wide": (n, 3 * n), "free": (7,)}
    omegas = {"h": 2.5} if kind == "dihedral" else None
    return rg.Symmetry.from_axes(axes, kinds={"h": kind}, omegas=omegas), shapes


def gated_units(n: int) -> tuple[rg.Symmetry, dict[str, tuple[int, ...]]]:
    """Return a symmetry with two scales, two signs and a permutation of the same units, as for a gated unit before a
    norm.
    """
    place = [
        rg.Placement("gate", 0, scale=(1, 0), sign=(1, 0)),
        rg.Placement("value", 0, scale=(0, 1), sign=(0, 1)),
        rg.Placement("out", 1, scale=(-2, -1), sign=(1, 1)),
        rg.Placement("fused", 0, start=0, scale=(1, 0), sign=(1, 0)),
        rg.Placement("fused", 0, start=n, scale=(0, 1), sign=(0, 1)),
    ]
    group = rg.Group("h", n, tuple(place), scales=2, signs=2)
    shapes = {"gate": (n, 3), "value": (n, 3), "out": (4, n), "fused": (2 * n, 3)}
    return rg.Symmetry((group,), shapes), shapes


def linear_heads(heads: int, size: int) -> tuple[rg.Symmetry, dict[str, tuple[int, ...]]]:
    """Return a symmetry of heads, with one invertible matrix per head, and permuted hidden units inside each head."""
    block = {"stride": size, "repeats": ((size, 1),)}
    inner = {"stride": 1, "repeats": ((heads, size),)}
    base = rg.Group(
        "heads",
        heads,
        (rg.Placement("q", 0, **block), rg.Placement("k", 0, **block), rg.Placement("e", 0), rg.Placement("f", 0)),
        is_base=True,
    )
    matrix = rg.Group(
        "qk",
        size,
        (rg.Placement("q", 0, **inner), rg.Placement("k", 0, is_inverse=True, **inner)),
        is_permuted=False,
        matrix="linear",
        within=("heads",),
    )
    # The experts' own axis is another axis of the same parameter.
    units = rg.Group(
        "units",
        5,
        (rg.Placement("e", 1, scale=(1,), sign=(1,)), rg.Placement("f", 2, scale=(-1,), sign=(1,))),
        scales=1,
        signs=1,
        within=("heads",),
    )
    shapes = {"q": (heads * size, 7), "k": (heads * size, 7), "e": (heads, 5, 3), "f": (heads, 3, 5)}
    return rg.Symmetry((base, matrix, units), shapes), shapes


def twice_nested(a: int, b: int) -> tuple[rg.Symmetry, dict[str, tuple[int, ...]]]:
    """Return a symmetry with groups of groups of units on one axis: S_3 within S_b within S_a."""
    outer = rg.Group("outer", a, (rg.Placement("w", 0, stride=3 * b, repeats=((b, 3), (3, 1))),), is_base=True)
    middle = rg.Group(
        "middle",
        b,
        (rg.Placement("w", 0, stride=3, repeats=((a, 3 * b), (3, 1))),),
        within=("outer",),
        is_base=True,
    )
    leaf = rg.Group(
        "leaf",
        3,
        (rg.Placement("w", 0, stride=1, repeats=((a, 3 * b), (b, 3)), scale=(1,)),),
        scales=1,
        within=("outer", "middle"),
    )
    shapes = {"w": (a * b * 3, 2)}
    return rg.Symmetry((outer, middle, leaf), shapes), shapes


def cases(n: int, m: int) -> list[tuple[rg.Symmetry, dict[str, tuple[int, ...]]]]:
    """Return every kind of symmetry, with the given sizes."""
    branch = gated_branch(n, m)
    several = [gated_units(n), linear_heads(n, m), twice_nested(n, m), (branch, dict(branch.shapes))]
    return [*(one_kind(kind, n) for kind in KINDS), *several]


def draw(shapes: dict[str, tuple[int, ...]], seed: int, *batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((*batch, *shape), generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-11) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape
        assert a[name].dtype == b[name].dtype
        assert torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance), name


def without_shifts(symmetry: Symmetry) -> Symmetry:
    """Return the subgroup of permutations, signs and scales."""
    return _smaller(symmetry, "shifts", parity=(), shift=())


def permutations_only(symmetry: Symmetry) -> Symmetry:
    """Return the subgroup of permutations, for groups that do not act by matrices."""
    return _smaller(symmetry, "shifts", "signs", "scales", parity=(), shift=(), sign=(), scale=())


def _smaller(symmetry: Symmetry, *families: str, **places: Any) -> Symmetry:
    groups = (
        replace(group, **dict.fromkeys(families, 0), placements=tuple(replace(p, **places) for p in group.placements))
        for group in symmetry.groups
    )
    return replace(symmetry, groups=tuple(groups))
