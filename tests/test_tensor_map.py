"""Two implementations of one model: the tensors of one are found among the tensors of the other by their values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import regauge as rg
from regauge.cli.main import main
from regauge.comparison import find_tensor_map
from regauge.comparison.conversion.orders import Strided
from regauge.comparison.conversion.tensor_map import NO_ORDER
from regauge.core.progress import Advance

HEADS, DEPTH, WIDTH, WIDE = 4, 3, 32, 80
QKV = ("q", "k", "v")
KINDS = ("weight", "bias")
Params = dict[str, Tensor]


def implementation(seed: int = 0, dtype: torch.dtype = torch.float64) -> Params:
    """Return a network of three layers with attention, gates, convolutions, biases and norms."""
    chance = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, dtype=dtype)

    params = {"embed.weight": draw(50, WIDTH), "norm.weight": 1 + 0.1 * draw(WIDTH)}
    for k in range(DEPTH):
        for name in (*QKV, "o"):
            params[f"layers.{k}.{name}.weight"], params[f"layers.{k}.{name}.bias"] = draw(WIDTH, WIDTH), draw(WIDTH)
        params[f"layers.{k}.up.weight"], params[f"layers.{k}.gate.weight"] = draw(WIDE, WIDTH), draw(WIDE, WIDTH)
        params[f"layers.{k}.down.weight"] = draw(WIDTH, WIDE)
        params[f"layers.{k}.conv.weight"] = draw(12, WIDTH, 3, 5)
        params[f"layers.{k}.ln.weight"], params[f"layers.{k}.ln.bias"] = 0.1 * draw(WIDTH), torch.zeros(WIDTH).to(dtype)
    return params


def layered(make: Callable[[Params], Params]) -> Callable[[Params], Params]:
    """Return a conversion of each layer, and of the tensors outside of layers."""

    def convert(a: Params) -> Params:
        b = {"wte": a["embed.weight"], "final.weight": a["norm.weight"]}
        for k in range(DEPTH):
            own = {name.removeprefix(f"layers.{k}."): one for name, one in a.items() if name.startswith(f"layers.{k}.")}
            b |= {f"h.{k}.{name}": one.contiguous() for name, one in make(own).items()}
        return b

    return convert


def others(own: Params, *taken: str) -> Params:
    """Return all tensors of a layer except the tensors of some modules."""
    return {f"m.{name}": one for name, one in own.items() if name.partition(".")[0] not in taken}


def rotated(x: Tensor) -> Tensor:
    """Return the rows of heads with interleaved rotary halves."""
    return x.reshape(HEADS, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def packed(own: Params) -> Params:
    return {f"attn.{kind}": torch.cat([own[f"{x}.{kind}"] for x in QKV]) for kind in ("weight", "bias")}


def by_head(own: Params) -> Params:
    def stack(kind: str) -> Tensor:
        parts = [own[f"{x}.{kind}"].unflatten(0, (HEADS, -1)) for x in QKV]
        return torch.stack(parts, 1).flatten(0, 2)

    return {f"attn.{kind}": stack(kind) for kind in ("weight", "bias")}


def grouped(own: Params) -> Params:
    """Return two groups of queries, each with one head of keys and values, of which A has fewer rows."""
    q, k, v = (own[f"{x}.weight"] for x in QKV)
    return {
        "attn.weight": torch.cat(
            [q.unflatten(0, (2, -1)), k.unflatten(0, (2, -1)), v.unflatten(0, (2, -1))], 1
        ).flatten(0, 1)
    }


def without_key_bias(own: Params) -> Params:
    bias = torch.cat([own["q.bias"], torch.zeros_like(own["k.bias"]), own["v.bias"]])
    return packed(own) | {"attn.bias": bias}


def scaled_queries(own: Params) -> Params:
    return packed(own | {f"q.{kind}": 0.25 * own[f"q.{kind}"] for kind in ("weight", "bias")})


CONVERSIONS: dict[str, Callable[[Params], Params]] = {
    "renamed": layered(lambda own: others(own)),
    "transposed": layered(lambda own: {n: x.T if x.ndim == 2 else x for n, x in others(own).items()}),
    "packed": layered(lambda own: packed(own) | others(own, *QKV)),
    "packed and transposed": layered(lambda own: {"w": packed(own)["attn.weight"].T} | others(own, *QKV)),
    "packed by head": layered(lambda own: by_head(own) | others(own, *QKV)),
    "packed by groups": layered(lambda own: grouped(own) | others(own, *QKV)),
    "a packed bias without keys": layered(lambda own: without_key_bias(own) | others(own, *QKV)),
    "rotary halves": layered(
        lambda own: (
            {f"{x}.{kind}": rotated(own[f"{x}.{kind}"]) for x in "qk" for kind in ("weight", "bias")}
            | others(own, "q", "k")
        )
    ),
    "columns by head": layered(lambda own: others(own) | {"m.o.weight": rotated(own["o.weight"].T).T}),
    "gate and up": layered(
        lambda own: {"mlp.weight": torch.cat([own["gate.weight"], own["up.weight"]])} | others(own, "up", "gate")
    ),
    "convolutions, height and width first": layered(
        lambda own: {"conv": own["conv.weight"].permute(2, 3, 1, 0)} | others(own, "conv")
    ),
    "convolutions turned around": layered(lambda own: {"conv": own["conv.weight"].flip(2, 3)} | others(own, "conv")),
    "convolutions as matrices": layered(lambda own: {"conv": own["conv.weight"].flatten(1)} | others(own, "conv")),
    "axes of one entry": layered(lambda own: {"down": own["down.weight"][:, :, None, None]} | others(own, "down")),
    "gates in another order": layered(
        lambda own: (
            {"up.weight": torch.cat([own["up.weight"][at : at + WIDE // 4] for at in (0, 20, 60, 40)])}
            | others(own, "up")
        )
    ),
    "packed with scaled queries": layered(lambda own: scaled_queries(own) | others(own, *QKV)),
    "experts whose gates and ups alternate": lambda a: {
        "experts": torch.stack(
            [
                torch.stack([a[f"layers.{k}.gate.weight"], a[f"layers.{k}.up.weight"]], 1).flatten(0, 1).T
                for k in range(DEPTH)
            ]
        ),
        **{name: one for name, one in a.items() if name.split(".")[-2] not in {"gate", "up"}},
    },
    "half as large": layered(lambda own: {"down": own["down.weight"] * 0.5} | others(own, "down")),
    "negative": layered(lambda own: {"down": own["down.weight"] * -1} | others(own, "down")),
    "one plus": layered(lambda own: others(own) | {"m.ln.weight": 1 + own["ln.weight"]}),
    "stacked layers": lambda a: {
        **{
            f"all.{name}": torch.stack([a[f"layers.{k}.{name}"] for k in range(DEPTH)])
            for name in (
                *(f"{x}.{kind}" for x in (*QKV, "o") for kind in ("weight", "bias")),
                "up.weight",
                "gate.weight",
            )
        },
        **{n: x for n, x in a.items() if not n.startswith("layers.") or n.split(".")[2] in {"down", "conv", "ln"}},
    },
}


def network(name: str, seed: int = 0) -> Params:
    params = implementation(seed)
    if name == "packed by groups":
        for key in [key for key in params if key.split(".")[-2] in {"k", "v"}]:
            params[key] = params[key][: WIDTH // 2].contiguous()
    return params


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_is_found_with_its_formula_and_converts_other_networks(name: str) -> None:
    a, fresh = network(name), network(name, seed=1)
    b, expected = CONVERSIONS[name](a), CONVERSIONS[name](fresh)
    found = find_tensor_map(a, b)
    assert not found.missing
    assert found.difference <= 1e-12
    for key, origin in found.origins.items():
        assert torch.allclose(eval(origin.formula, {"a": a, "torch": torch}), b[key], rtol=1e-12), origin.formula
    made = found.apply(fresh)
    constant = {key for key, one in b.items() if (one == one.reshape(-1)[0]).all()}
    for key in expected.keys() - constant:
        assert torch.allclose(made[key], expected[key], rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("name", [name for name in CONVERSIONS if not name.startswith("packed and")])
def test_all_of_a_in_plain_orders_is_another_layout(name: str) -> None:
    found = find_tensor_map(a := network(name), CONVERSIONS[name](a))
    has_all = name not in {"packed by groups", "a packed bias without keys"}  # Which leave biases out.
    assert found.is_layout == has_all, (found.unused, found.parted)
    assert found.facts["verdict"] == ("same network in another layout" if has_all else "made of A")


@pytest.mark.parametrize("name", ["packed", "rotary halves", "convolutions, height and width first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_rounded_is_found_within_rounding(name: str, dtype: torch.dtype) -> None:
    a = network(name)
    found = find_tensor_map(a, {key: one.to(dtype) for key, one in CONVERSIONS[name](a).items()})
    assert not found.missing
    assert 0 < found.difference < torch.finfo(dtype).eps


def test_permuted_units_are_found_in_an_order_that_no_reshape_gives() -> None:
    a = implementation()
    order = torch.randperm(WIDE, generator=torch.Generator().manual_seed(2))
    b = {
        **a,
        "layers.0.up.weight": a["layers.0.up.weight"][order],
        "layers.0.down.weight": a["layers.0.down.weight"][:, order],
    }
    found = find_tensor_map(a, b)
    assert not found.missing
    assert not found.is_layout
    assert NO_ORDER in found.origins["layers.0.up.weight"].formula
    assert any("permuted" in note for note in found.notes)
    assert all(torch.equal(found.apply(a)[key], b[key]) for key in b)


def test_changed_new_and_unused_tensors_prevent_a_conversion_and_are_named() -> None:
    a = implementation()
    chance = torch.Generator().manual_seed(3)
    noise = torch.randn(WIDTH, WIDTH, generator=chance, dtype=torch.float64)
    b = {key: one for key, one in a.items() if key != "layers.2.o.weight"}
    b |= {"layers.1.q.weight": a["layers.1.q.weight"] + 0.05 * noise, "new": noise, "new.bias": noise[0]}
    found = find_tensor_map(a, b)
    assert set(found.missing) == {"layers.1.q.weight", "new", "new.bias"}
    assert "layers.2.o.weight" in found.unused
    assert "'layers.1.q.weight', which differs by 0.04" in found.origins["layers.1.q.weight"].reason
    assert found.origins["new"].reason == "no tensor of A has these values"
    assert "3 tensors" not in str(found)
    with pytest.raises(ValueError, match="cannot be made of A's tensors"):
        found.apply(a)
    assert find_tensor_map(a, implementation(seed=5)).share < 0.01


def test_rows_that_were_added_are_told_from_those_of_a() -> None:
    a = implementation()
    chance = torch.Generator().manual_seed(3)
    zeros, drawn = torch.zeros(6, WIDTH).double(), torch.randn(6, WIDTH, generator=chance).double()
    padded, longer = (find_tensor_map(a, {"wte": torch.cat([a["embed.weight"], end])}) for end in (zeros, drawn))
    assert not padded.missing
    assert padded.origins["wte"].formula == 'torch.cat([a["embed.weight"], torch.full((6, 32), 0)])'
    assert longer.origins["wte"].reason == "6 of its 56 fibers along its longest axis are not in A, from 50 on"


def test_a_layer_that_is_made_otherwise_is_remarked() -> None:
    a = implementation()
    b = CONVERSIONS["renamed"](a)
    b["h.1.m.q.weight"], b["h.1.m.k.weight"] = b["h.1.m.k.weight"], b["h.1.m.q.weight"]
    found = find_tensor_map(a, b)
    assert set(found.uneven) == {"h.1.m.q.weight", "h.1.m.k.weight"}
    assert not found.is_layout
    assert "'h.1.m.q.weight' is made differently than 'h.0.m.q.weight' of another layer" in found.notes
    assert "'h.1.m.q.weight', 'h.1.m.k.weight' differently than in the other layers" in str(found)
    assert not find_tensor_map(a, CONVERSIONS["renamed"](a)).notes


def test_names_with_quotes_are_written_as_they_are() -> None:
    a = {'a "quoted" name': torch.randn(4, 6), "it's": torch.randn(5, 3)}
    found = find_tensor_map(a, {"x": a['a "quoted" name'].T, "y": a["it's"]})
    assert torch.equal(eval(found.origins["x"].formula, {"a": a}), a['a "quoted" name'].T)
    assert torch.equal(eval(found.origins["y"].formula, {"a": a}), a["it's"])


def test_a_tied_head_is_not_unused() -> None:
    a = implementation()
    a["head.weight"] = a["embed.weight"].clone()
    assert find_tensor_map(a, CONVERSIONS["packed"](a)).is_layout


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 7), (2, 2, 2, 2)])
def test_orders_of_reshapes_are_recognized_and_random_ones_are_not(shape: tuple[int, ...]) -> None:
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for axes in ([*range(len(shape))], [*range(len(shape))][::-1]):
        index = places.permute(axes).flatten().numpy()
        found = Strided.of(index, index.size)
        assert found is not None
        assert (found.index() == index).all()
    part = places[:, 1].flatten().numpy()
    found = Strided.of(part, places.numel())
    assert found is not None
    assert (found.index() == part).all()
    shuffled = torch.randperm(31, generator=torch.Generator().manual_seed(0)).numpy()
    assert Strided.of(shuffled, 31) is None


def test_python_writes_the_page_of_the_command_and_shows_progress(tmp_path: Path) -> None:
    a = network("packed by head")
    b = CONVERSIONS["packed by head"](a)
    page = tmp_path / "page.html"
    done: list[tuple[float, float]] = []

    def progress(label: str, total: float, /) -> Advance:
        return lambda amount=1: done.append((amount, total))

    find_tensor_map(a, b, out=page, progress=progress)
    assert "a[&#34;layers.*.q.weight&#34;]" in page.read_text()
    assert sum(count for count, _ in done) == done[0][1] > 0
    with pytest.raises(FileExistsError, match="exists"):
        find_tensor_map(a, b, out=page)


@pytest.mark.parametrize("bad", [{}, nn.Module()])
def test_networks_without_tensors_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="without tensors"):
        find_tensor_map(bad, implementation())  # type: ignore[arg-type]


def test_values_that_are_no_numbers_are_refused_by_name() -> None:
    b = implementation()
    b["layers.0.up.weight"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'layers.0.up.weight' of B holds NaN, and cannot be compared"):
        find_tensor_map(implementation(), b)
    with pytest.raises(ValueError, match="'x' is not a tensor with values"):
        find_tensor_map(implementation(), {"x": torch.empty(3, 3, device="meta")})


def test_masks_integers_and_complex_tensors_are_found_whole() -> None:
    a = implementation()
    a |= {
        "mask": torch.full((6, 6), -torch.inf).triu(1),
        "at": torch.arange(6),
        "c": torch.randn(3, dtype=torch.complex64),
    }
    b = {f"own.{name}": one for name, one in a.items()}
    found = find_tensor_map(a, b)
    assert found.is_layout
    assert find_tensor_map(a, b | {"own.mask": torch.full((6, 6), -torch.inf).tril(-1)}).missing == ("own.mask",)


def test_the_command_says_that_files_are_layouts_of_one_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = network("packed by head")
    b = CONVERSIONS["packed by head"](a)
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    page = tmp_path / "page.html"
    main(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "-o", str(page)])
    told = capsys.readouterr().out
    assert "same network in another layout: all 32 tensors of B are made of A's tensors; values are equal" in told
    assert 'a["layers.*.q.weight"].reshape(4, -1, 32)' in told
    assert "a[&#34;layers.*.q.weight&#34;]" in page.read_text()


def test_a_reordered_tensor_of_the_same_name_is_noted() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    symmetry = rg.discover(model, torch.randn(2, 6, dtype=torch.float64))
    a = {name: one.detach() for name, one in model.state_dict().items()}
    turned = {**a, "0.weight": a["0.weight"].reshape(8, 2, 3).transpose(1, 2).reshape(8, 6)}
    notes = rg.compare(a, turned, symmetry).notes
    assert any("B holds A's values of 1 tensor in another order, for example '0.weight'" in note for note in notes)
    changed = {**a, "0.weight": a["0.weight"] + 0.1}
    assert not any("another order" in note for note in rg.compare(a, changed, symmetry).notes)
