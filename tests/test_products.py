"""Matrix products are equal with both libraries, for any memory layout of the matrices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regauge.core import products
from regauge.core.products import (
    LARGE_PRODUCT,
    VARIABLE,
    add_matmul,
    default_library,
    has_onednn,
    library,
    linear,
    matmul,
    scaled_matmul,
    set_library,
    use_library,
)

SIZE = 144
TOLERANCE = 1e-5
"""The tolerance for sums of 144 products in single precision, relative to the largest result."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "every second row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "every second column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a part": lambda x: torch.nn.functional.pad(x, (3, 5))[..., 3:-5],
}


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found.double() - expected).abs().max() / expected.abs().max()) < TOLERANCE


def matrices(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_all_layouts(library: str, left: str, right: str) -> None:
    a, b = LAYOUTS[left](matrices()), LAYOUTS[right](matrices(seed=1))
    assert close(matmul(a, b), a.double() @ b.double())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [None, 1, 3])
def test_factors_and_shifts(library: str, layout: str, count: int | None) -> None:
    """The test covers products of two matrices and of stacks."""
    lead = () if count is None else (count,)
    a, b = LAYOUTS[layout](matrices(*lead)), LAYOUTS[layout](matrices(*lead, seed=1))
    expected = a.double() @ b.double()
    assert close(matmul(a, b), expected)
    shifts = torch.randn(*lead, SIZE, 1), torch.randn(*lead, 1, SIZE), torch.randn(SIZE)
    for factor in (1.0, -0.5):
        buffer = torch.full((*lead, SIZE, SIZE), torch.nan)
        assert close(scaled_matmul(a, b, buffer=buffer, factor=factor), factor * expected)
        for shift in shifts:
            found = scaled_matmul(a, b, shift=shift, factor=factor, buffer=buffer)
            assert close(found, factor * (expected + shift.double()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_added(library: str, layout: str) -> None:
    a, b, before = LAYOUTS[layout](matrices()), matrices(seed=1), matrices(seed=2)
    total = before.clone()
    add_matmul(total, a.mT, b, factor=0.5)
    assert close(total, before.double() + 0.5 * a.mT.double() @ b.double())


def test_arguments_stay_as_they_are(library: str) -> None:
    a, b, shift = matrices(2), matrices(2, seed=1), torch.randn(2, SIZE, 1)
    before = a.clone(), b.clone(), shift.clone()
    scaled_matmul(a, b, shift=shift, factor=2.0, buffer=torch.empty(2, SIZE, SIZE))
    assert all(torch.equal(x, y) for x, y in zip((a, b, shift), before, strict=True))


def test_what_is_not_a_number_stays_in_its_network(library: str) -> None:
    a, b = matrices(3), matrices(3, seed=1)
    a[1, 0, 0] = torch.nan
    found = matmul(a, b)
    assert found[1, 0].isnan().all()
    assert found[1, 1:].isfinite().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("case", ["double precision", "small", "with gradients"])
def test_what_onednn_does_not_do(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_chosen", "onednn")
    monkeypatch.setattr(products, "_by_onednn", lambda *_: pytest.fail("multiplied by oneDNN"))
    a, b = matrices(), matrices(seed=1)
    if case == "double precision":
        a, b = a.double(), b.double()
    elif case == "small":
        a = a[: LARGE_PRODUCT // SIZE**2 - 1]
    else:
        a.requires_grad_()
    torch.testing.assert_close(matmul(a, b), a @ b)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_f": True}, "blas"),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, "onednn"),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, "blas"),
        ({"cpu_name": "ARM Neoverse-V1", "architecture": "arm64"}, "blas"),
    ],
)
def test_the_default_follows_from_the_processor(
    processor: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
    assert default_library.__wrapped__() == (expected if has_onednn() else "blas")
    monkeypatch.setattr(products, "has_onednn", lambda: False)
    assert default_library.__wrapped__() == "blas"


def test_the_library_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_onednn", lambda: True)
    monkeypatch.setattr(products, "_chosen", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert library() == default_library()
    monkeypatch.setenv(VARIABLE, "onednn")
    assert library() == "onednn"
    set_library("blas")
    assert library() == "blas"
    with use_library("onednn"):
        assert library() == "onednn"
        with use_library(None):
            assert library() == "onednn"
    assert library() == "blas"
    set_library(None)
    assert library() == "onednn"
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(ValueError, match=f"{VARIABLE} is 'mkl', but the libraries are blas and onednn"):
        library()
    monkeypatch.setattr(products, "has_onednn", lambda: False)
    with pytest.raises(ValueError, match="'onednn', but this torch was built without it"):
        set_library("onednn")


@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 160), (160, 96)])
def test_linear_maps_have_the_gradients_of_all_orders(library: str, inputs: int, outputs: int, is_biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator) for shape in ((3, 64, inputs), (outputs, inputs), (outputs,))]
    given = [tensor.requires_grad_() for tensor in given[: 2 + is_biased]]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]

    def derivatives(map_rows: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        made = map_rows(*tensors)
        first = torch.autograd.grad(made.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), tensors)
        return [made, *first, *second]

    assert 3 * 64 * inputs * outputs >= LARGE_PRODUCT
    pairs = zip(derivatives(linear, given), derivatives(torch.nn.functional.linear, exact), strict=True)
    assert all(close(found.detach(), expected.detach()) for found, expected in pairs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_linear_maps_are_differentiated_forward(library: str) -> None:
    x, weight, bias = torch.randn(128, SIZE), torch.randn(SIZE, SIZE), torch.randn(SIZE)
    tangents = [torch.randn_like(tensor) for tensor in (x, weight, bias)]
    expected = tangents[0].double() @ weight.double().T + x.double() @ tangents[1].double().T + tangents[2]
    with torch.autograd.forward_ad.dual_level():
        duals = (torch.autograd.forward_ad.make_dual(*pair) for pair in zip((x, weight, bias), tangents, strict=True))
        assert close(torch.autograd.forward_ad.unpack_dual(linear(*duals)).tangent, expected)


def test_linear_maps_of_functions_that_are_transformed() -> None:
    x, weight = torch.randn(4, 128, SIZE), torch.randn(4, SIZE, SIZE)
    assert close(torch.func.vmap(linear)(x, weight), x.double() @ weight.double().mT)
    found = torch.func.grad(lambda w: linear(x[0], w).square().sum())(weight[0])
    inner = weight[0].double() @ (x[0].double().T @ x[0].double())
    assert close(found, 2 * inner)


@pytest.mark.parametrize("case", ["double precision", "small", "vmap"])
def test_linear_maps_that_onednn_does_not_do(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_chosen", "onednn")
    monkeypatch.setattr(products, "_by_onednn", lambda *_: pytest.fail("multiplied by oneDNN"))
    x, weight = matrices(), matrices(seed=1)
    if case == "double precision":
        x, weight = x.double(), weight.double()
    elif case == "small":
        x = x[: LARGE_PRODUCT // SIZE**2 - 1]
    found = torch.func.vmap(linear, (None, 0))(x, weight.unsqueeze(0))[0] if case == "vmap" else linear(x, weight)
    torch.testing.assert_close(found, x @ weight.mT)
