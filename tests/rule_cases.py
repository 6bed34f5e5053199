"""At least one small module for every operator that has a rule.

A case is a function `(m, h, g) -> result` between layers. `h` and `g` are two hidden tensors of the same shape, and
`m.p(*shape)` is a parameter of a given shape. For each case, `CASES` states the shape of the hidden tensors, and the
groups that may act on the units of `h`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

ops: Any = torch.ops.aten
Operator = Callable[["Between", Tensor, Tensor], Any]
INPUTS = {"rows": (5, 4), "tokens": (3, 5, 4), "line": (2, 3, 7), "image": (2, 3, 6, 6), "volume": (2, 2, 4, 4, 4)}
UNITS = {"rows": 6, "tokens": 6, "line": 8, "image": 8, "volume": 4}


class Case(NamedTuple):
    """An operator with the shape of its input, and the kinds of groups on the units before it ("frozen" without a
    group).
    """

    where: str
    expected: str
    operator: Operator


class Between(nn.Module):
    """Two layers of the same shape, an operator, and a linear layer that reads the result.

    Args:
        operator: The operator between the layers.
        where: The shape of the hidden tensors, a key of `INPUTS`.
    """

    def __init__(self, operator: Operator, where: str) -> None:
        super().__init__()
        self.operator = operator
        self.generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(INPUTS[where], generator=self.generator, dtype=torch.float64)
        units, dims = UNITS[where], len(INPUTS[where]) - 2
        if where in ("rows", "tokens"):
            self.entry, self.second = (nn.Linear(INPUTS[where][-1], units) for _ in range(2))
        else:
            conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
            self.entry, self.second = (conv(INPUTS[where][1], units, 1) for _ in range(2))
        self.held = nn.ParameterDict()
        self.register_buffer("mean", torch.randn(units, generator=self.generator))
        self.register_buffer("var", torch.rand(units, generator=self.generator) + 0.5)
        self.double()
        with torch.no_grad():
            self(self.inputs)

    def p(self, *shape: int, tag: str = "") -> Tensor:
        """Return a parameter of a shape. Calls with the same tag return the same parameter."""
        key = "_".join(map(str, ("p", *shape))) + tag
        if key not in self.held:
            fan_in = max(1, int(torch.Size(shape[1:]).numel()))
            drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            self.held[key] = nn.Parameter(drawn / fan_in**0.5)
        held: Tensor = self.held[key]
        return held

    def forward(self, x: Tensor) -> Tensor:
        total = self.p(3, tag="out")
        results = self.operator(self, self.entry(x), self.second(x))
        for k, y in enumerate(results if isinstance(results, list | tuple) else [results]):
            flat = y.reshape(len(x), -1) if y.ndim and y.shape[0] == len(x) else y.reshape(1, -1)
            total = total + fn.linear(flat.to(x.dtype), self.p(3, flat.shape[1], tag=f"out{k}"))
        return total


CASES: dict[str, Case] = {}


def add(where: str, expected: str, /, **operators: Operator) -> None:
    for name, operator in operators.items():
        assert name not in CASES, name
        CASES[name] = Case(where, expected, operator)


def one(names: str, where: str, expected: str) -> None:
    """Return cases for operators of one tensor."""
    for name in names.split():
        add(where, expected, **{name: partial(_unary, getattr(ops, name))})


def _but_four(h: Tensor) -> Tensor:
    """Mask all but the four largest of six units."""
    chosen = torch.zeros_like(h).scatter(-1, h.topk(4, -1).indices, 1)
    return h.masked_fill(~chosen.bool(), -torch.inf)


def _unary(op: Any, m: "Between", h: Tensor, g: Tensor) -> Any:
    return op(h)


# One tensor, entry by entry

one("clone contiguous alias detach lift_fresh_copy positive neg negative", "rows", "linear")
add(
    "rows",
    "linear",
    dropout=lambda m, h, g: ops.dropout(h, 0.5, False),
    feature_dropout=lambda m, h, g: ops.feature_dropout(h, 0.5, False),
    alpha_dropout=lambda m, h, g: ops.alpha_dropout(h, 0.5, False),
    native_dropout=lambda m, h, g: ops.native_dropout(h, 0.5, False)[0],
    _to_copy=lambda m, h, g: ops._to_copy(h, dtype=torch.float64),
    to=lambda m, h, g: h.to(torch.float32).to(torch.float64) + g.to(h.device),
    type_as=lambda m, h, g: h.type_as(g),
    times_two=lambda m, h, g: 2 * h,
    halved=lambda m, h, g: h / -2,
    zero_times=lambda m, h, g: h * 0.0,
    plus_zero=lambda m, h, g: h + torch.zeros_like(h),
    flip_rows=lambda m, h, g: h.flip(0),
)
one("relu leaky_relu rrelu", "rows", "scaled")
add(
    "rows",
    "scaled",
    leaky_negative=lambda m, h, g: fn.leaky_relu(h, -0.3),
    leaky_steep=lambda m, h, g: fn.leaky_relu(h, 2.0),
    clamp_min=lambda m, h, g: ops.clamp_min(h, 0),
    clamp_max=lambda m, h, g: ops.clamp_max(h, 0),
    clamp_at_zero=lambda m, h, g: h.clamp(min=0),
    threshold=lambda m, h, g: fn.threshold(h, 0.0, 0.0),
    prelu=lambda m, h, g: fn.prelu(h, m.p(6)),
    prelu_one=lambda m, h, g: fn.prelu(h, m.p(1)),
    _prelu_kernel=lambda m, h, g: ops._prelu_kernel(h, m.p(1, 6)),
    abs=lambda m, h, g: ops.abs(h),
    absolute=lambda m, h, g: ops.absolute(h),
    square=lambda m, h, g: h.square(),
    cube=lambda m, h, g: h**3,
    inverse_square=lambda m, h, g: h**-2,
    reciprocal=lambda m, h, g: h.reciprocal(),
    sqrt=lambda m, h, g: h.abs().sqrt(),
    rsqrt=lambda m, h, g: h.square().rsqrt(),
    root=lambda m, h, g: h.abs() ** 0.5,
    inverse_root=lambda m, h, g: h.abs() ** -0.5,
    isnan=lambda m, h, g: h * h.isnan().logical_not(),
    isfinite=lambda m, h, g: h * h.isfinite(),
    isinf=lambda m, h, g: h * h.isinf().logical_not(),
    sign=lambda m, h, g: h.sign(),
    sgn=lambda m, h, g: h.sgn(),
    gt_zero=lambda m, h, g: h * (h > 0),
)
one("tanh erf asinh arcsinh atan arctan sinh tan round trunc frac softshrink hardshrink hardtanh", "rows", "signed")
add(
    "rows",
    "signed",
    asin=lambda m, h, g: h.tanh().asin(),
    atanh=lambda m, h, g: (h.tanh() / 2).atanh(),
    erfinv=lambda m, h, g: h.tanh().erfinv(),
    cosh=lambda m, h, g: h.cosh(),
    i0=lambda m, h, g: ops.i0(h),
    sinc=lambda m, h, g: ops.sinc(h),
    clamp=lambda m, h, g: h.clamp(-1, 1),
    clip=lambda m, h, g: ops.clip(h, -0.5, 0.5),
    hardtanh_wide=lambda m, h, g: fn.hardtanh(h, -2, 2),
    round_decimals=lambda m, h, g: h.round(decimals=1),
    special_i1=lambda m, h, g: torch.special.i1(h),
)
add(
    "rows",
    "dihedral",
    sin=lambda m, h, g: h.sin(),
    cos=lambda m, h, g: h.cos(),
    sin_fast=lambda m, h, g: (3 * h).sin(),
    sin_and_cos=lambda m, h, g: h.sin() * h.cos(),
    sin_plus=lambda m, h, g: (1 - 2 * h).sin(),
)
one(
    "gelu silu sigmoid exp exp2 expm1 softplus elu selu celu mish hardsigmoid hardswish relu6 log_sigmoid floor ceil "
    "erfc nan_to_num",
    "rows",
    "permutation",
)
add(
    "rows",
    "permutation",
    logit=lambda m, h, g: (h.sigmoid() / 2 + 0.1).logit(),
    log=lambda m, h, g: h.exp().log().tanh(),
    log2=lambda m, h, g: h.exp().log2(),
    log10=lambda m, h, g: h.exp().log10(),
    log1p=lambda m, h, g: h.exp().log1p(),
    log_sigmoid_forward=lambda m, h, g: ops.log_sigmoid_forward(h)[0],
    acos=lambda m, h, g: (h.tanh() + 0.1).clamp(-1, 1).acos(),
    acosh=lambda m, h, g: (h.exp() + 1).acosh(),
    lgamma=lambda m, h, g: h.exp().lgamma(),
    digamma=lambda m, h, g: h.exp().digamma(),
    clamp_unit=lambda m, h, g: h.clamp(0, 1),
    clamp_low=lambda m, h, g: h.clamp(min=0.1),
    clamp_reversed=lambda m, h, g: h.clamp(1.0, -1.0) + h.exp(),
    clamp_by_tensors=lambda m, h, g: h.clamp(m.p(6), m.p(6).abs() + 1),
    clamp_min_by_tensor=lambda m, h, g: ops.clamp_min(h, m.p(6)),
    threshold_high=lambda m, h, g: fn.threshold(h, 1.0, 0.0),
    pow=lambda m, h, g: ops.pow(h.exp(), 1.5),
    pow_zero=lambda m, h, g: h**0 + h.exp(),
    pow_of_number=lambda m, h, g: 2.0**h,
    pow_by_tensor=lambda m, h, g: h.exp() ** m.p(6).tanh(),
    bitwise_not=lambda m, h, g: h.exp() * ~(h > 0.2),
    logical_not=lambda m, h, g: h.exp() * (h > 0.2).logical_not(),
    to_integer=lambda m, h, g: (3 * h).to(torch.int64),
    to_half=lambda m, h, g: h.to(torch.float16),
    to_bool=lambda m, h, g: h.exp() * (h - 0.1).to(torch.bool),
    copy_to_integer=lambda m, h, g: ops.copy(torch.zeros(5, 6, dtype=torch.int64), 3 * h),
    glu_of_rows=lambda m, h, g: fn.glu(torch.cat([h, g]), 0),
)
add("rows", "scaled", glu=lambda m, h, g: fn.glu(torch.cat([h, g], 1), 1))
add("rows", "frozen", view_as_integer=lambda m, h, g: h.view(torch.int64) * 1e-18)

# Two tensors, entry by entry

add(
    "rows",
    "linear",
    add=lambda m, h, g: ops.add(h, g),
    add_vector=lambda m, h, g: h + m.p(6),
    add_alpha=lambda m, h, g: torch.add(h, g, alpha=-2),
    sub=lambda m, h, g: h - g,
    subtract=lambda m, h, g: ops.subtract(h, m.p(6)),
    rsub=lambda m, h, g: ops.rsub(h, g, alpha=3),
    add_itself=lambda m, h, g: h + h,
    lerp=lambda m, h, g: torch.lerp(h, g, 0.3),
    lerp_by_column=lambda m, h, g: torch.lerp(h, g, m.p(5, 1)),
    mul_by_scalar=lambda m, h, g: h * m.p(),
    mul_by_column=lambda m, h, g: h * m.p(5, 1),
    mul_by_one_entry=lambda m, h, g: h * m.p(1, 1),
    where_by_column=lambda m, h, g: torch.where(m.p(5, 1) > 0, h, g),
    masked_fill_by_column=lambda m, h, g: h.masked_fill(g[:, :1] > 0, 0.0),
)
add(
    "rows",
    "scaled",
    mul=lambda m, h, g: h * g,
    mul_vector=lambda m, h, g: h * m.p(6),
    multiply=lambda m, h, g: ops.multiply(h, g),
    mul_itself=lambda m, h, g: h * h,
    mul_thrice=lambda m, h, g: h * h * g,
    div=lambda m, h, g: h / g,
    divide=lambda m, h, g: ops.divide(h, m.p(6)),
    true_divide=lambda m, h, g: ops.true_divide(m.p(6), h),
    addcmul=lambda m, h, g: torch.addcmul(h, g, m.p(6), value=-0.5),
    addcdiv=lambda m, h, g: torch.addcdiv(h, g, m.p(6), value=2),
    lerp_by_vector=lambda m, h, g: torch.lerp(h, h.relu(), m.p(6)),
    maximum=lambda m, h, g: torch.maximum(h, g),
    minimum=lambda m, h, g: torch.minimum(h, m.p(6)),
    fmax=lambda m, h, g: torch.fmax(h, g),
    fmin=lambda m, h, g: torch.fmin(h, g),
    maximum_with_zeros=lambda m, h, g: torch.maximum(h, torch.zeros_like(h)),
    where=lambda m, h, g: torch.where(h > 0, h, g),
    masked_fill=lambda m, h, g: h.masked_fill(h < 0, 0.0),
    gt=lambda m, h, g: ops.gt(h, 0) * g,
    lt=lambda m, h, g: ops.lt(h, 0) * g,
    ge=lambda m, h, g: ops.ge(h, 0) * g,
    le=lambda m, h, g: ops.le(h, 0) * g,
    eq=lambda m, h, g: ops.eq(h, 0) * g + h.abs(),
    ne=lambda m, h, g: ops.ne(h, 0) * g,
    greater=lambda m, h, g: ops.greater(h, 0) * g,
    less=lambda m, h, g: ops.less(h, 0) * g,
    greater_equal=lambda m, h, g: ops.greater_equal(h, 0) * g,
    less_equal=lambda m, h, g: ops.less_equal(h, 0) * g,
    not_equal=lambda m, h, g: ops.not_equal(h, 0) * g,
    logical_and=lambda m, h, g: torch.logical_and(h > 0, g > 0) * g,
    logical_or=lambda m, h, g: torch.logical_or(h > 0, g > 0) * h,
    logical_xor=lambda m, h, g: torch.logical_xor(h > 0, g > 0) * h,
    bitwise_and=lambda m, h, g: torch.bitwise_and(h > 0, g > 0) * h,
    bitwise_or=lambda m, h, g: torch.bitwise_or(h > 0, g > 0) * h,
    bitwise_xor=lambda m, h, g: torch.bitwise_xor(h > 0, g > 0) * h,
    __and__=lambda m, h, g: ((h > 0) & (g > 0)) * h,
    __or__=lambda m, h, g: ((h > 0) | (g > 0)) * h,
    __xor__=lambda m, h, g: ((h > 0) ^ (g > 0)) * h,
)
add(
    "rows",
    "permutation",
    add_number=lambda m, h, g: (h + 1).relu(),
    add_scalar=lambda m, h, g: h.relu() + m.p(),
    add_column=lambda m, h, g: (h + m.p(5, 1)).relu(),
    add_ones=lambda m, h, g: (h + torch.ones_like(h)).relu(),
    div_floor=lambda m, h, g: torch.div(h, g, rounding_mode="floor"),
    div_trunc=lambda m, h, g: torch.div(h, m.p(6), rounding_mode="trunc"),
    floor_divide=lambda m, h, g: torch.floor_divide(h, g),
    remainder=lambda m, h, g: torch.remainder(h, g),
    fmod=lambda m, h, g: torch.fmod(h, m.p(6)),
    atan2=lambda m, h, g: torch.atan2(h, g),
    hypot=lambda m, h, g: torch.hypot(h, g),
    logaddexp=lambda m, h, g: torch.logaddexp(h, g),
    logaddexp2=lambda m, h, g: torch.logaddexp2(h, m.p(6)),
    xlogy=lambda m, h, g: torch.xlogy(h, g.exp()),
    isclose=lambda m, h, g: torch.isclose(h, g, atol=0.3) * h.exp(),
    gt_tensor=lambda m, h, g: (h > g) * h,
    gt_number=lambda m, h, g: (h > 0.2) * h,
    eq_number=lambda m, h, g: (h.round() == 1) * h.exp(),
    maximum_column=lambda m, h, g: torch.maximum(h, m.p(5, 1)),
    maximum_number=lambda m, h, g: torch.maximum(h, torch.full((6,), 0.1, dtype=h.dtype)),
    where_number=lambda m, h, g: torch.where(h > 0, h, 0.5),
    where_scalar=lambda m, h, g: torch.where(h > 0, h, m.p()),
)
add(
    "rows",
    "scaled",
    masked_fill_number=lambda m, h, g: h.masked_fill(g > 0, -1.0),
)
add("rows", "frozen", add_range=lambda m, h, g: h + torch.arange(6, dtype=h.dtype))

# Reductions

add(
    "tokens",
    "linear",
    sum=lambda m, h, g: h.sum(1),
    mean=lambda m, h, g: h.mean(-2, keepdim=True),
    sum_of_tokens_and_rows=lambda m, h, g: h.sum((0, 1)),
    nansum=lambda m, h, g: h.nansum(1),
    nanmean=lambda m, h, g: h.nanmean(1),
    cumsum=lambda m, h, g: h.cumsum(1),
    unfold=lambda m, h, g: h.unfold(1, 3, 1),
    fft_fft=lambda m, h, g: ops.view_as_real(torch.fft.fft(h, dim=1)),
    fft_ifft=lambda m, h, g: ops.view_as_real(torch.fft.ifft(torch.fft.fft(h, dim=1), n=4, dim=-2)),
    fft_rfft=lambda m, h, g: ops.view_as_real(torch.fft.rfft(h, dim=1)),
    fft_irfft=lambda m, h, g: torch.fft.irfft(torch.fft.rfft(h, dim=1), n=7, dim=1),
    fft_hfft=lambda m, h, g: torch.fft.hfft(torch.fft.ihfft(h, dim=1), dim=1),
)
add(
    "tokens",
    "permutation",
    sum_of_units=lambda m, h, g: h.relu().sum(-1),
    sum_of_all=lambda m, h, g: h.sum(),
    sum_of_no_dims=lambda m, h, g: ops.sum.dim_IntList(h, []),
    mean_of_units=lambda m, h, g: h.mean(2, keepdim=True),
    logsumexp=lambda m, h, g: h.logsumexp(-1),
    logsumexp_of_tokens=lambda m, h, g: h.logsumexp((0, 1)),
    prod=lambda m, h, g: h.prod(-1),
    prod_of_tokens=lambda m, h, g: h.prod(1),
    any=lambda m, h, g: (h > 0.5).any(-1) + (h > 0.3).any(1).sum(),
    all=lambda m, h, g: (h > -0.5).all(-1) + (h > -0.3).all(1).sum(),
    amax=lambda m, h, g: h.amax(-1),
    amin=lambda m, h, g: h.amin((1, 2)),
    max=lambda m, h, g: h.max(-1).values,
    max_of_all=lambda m, h, g: h.max(),
    argmax=lambda m, h, g: m.p(6, 4)[h.argmax(-1)],
    argmin=lambda m, h, g: fn.embedding(h.argmin(-1), m.p(6, 4)),
    argmax_of_all=lambda m, h, g: h.exp().sum(1) * g.argmax(),
    sort=lambda m, h, g: h.sort(-1).values,
    topk=lambda m, h, g: h.topk(2, -1).values,
    topk_as_a_set=lambda m, h, g: h.topk(3, -1, sorted=False).values.sum(-1),
    topk_of_those_left=lambda m, h, g: m.p(6, 4)[_but_four(h).topk(3, -1, sorted=False).indices].sum(2),
    overwritten=lambda m, h, g: m.p(6, 4)[h.scatter(-1, h.argmax(-1, keepdim=True), -torch.inf).argmax(-1)],
    positions_together=lambda m, h, g: m.p(6, 4)[torch.cat([h.topk(2, -1).indices, h.topk(1, -1).indices], -1)],
    topk_indices=lambda m, h, g: m.p(6, 4)[h.topk(2, -1).indices],
    argsort=lambda m, h, g: m.p(6, 4)[h.argsort(-1)],
    sort_both=lambda m, h, g: torch.gather(g, -1, h.sort(-1).indices) * h.sort(-1, descending=True).values,
    max_indices=lambda m, h, g: m.p(6, 4)[h.max(-1).indices],
    var_of_units=lambda m, h, g: h.tanh().var(-1),
    logcumsumexp=lambda m, h, g: h.logcumsumexp(1),
    cumprod=lambda m, h, g: h.cumprod(1),
)
add(
    "tokens",
    "scaled",
    normalized_tokens=lambda m, h, g: fn.normalize(h, dim=1),
    cosine_of_tokens=lambda m, h, g: fn.cosine_similarity(h, g, 1),
    amax_of_tokens=lambda m, h, g: h.amax(1),
    min=lambda m, h, g: h.min(1).values,
    max_other=lambda m, h, g: torch.max(h, g),
    var=lambda m, h, g: h.var(1, correction=0),
    std=lambda m, h, g: h.std(1, keepdim=True),
    var_mean=lambda m, h, g: torch.var_mean(h, 1),
    std_mean=lambda m, h, g: torch.std_mean(h, (0, 1)),
    sort_of_tokens=lambda m, h, g: h.sort(1).values,
    topk_of_tokens=lambda m, h, g: h.topk(2, 1).values,
    cummax=lambda m, h, g: h.cummax(1).values,
    cummin=lambda m, h, g: h.cummin(1).values,
    cummax_indices=lambda m, h, g: h.cummax(1).indices,
    norm_of_tokens=lambda m, h, g: h.norm(dim=1),
    square_of_tokens=lambda m, h, g: (h * h).sum(1),
)
add(
    "tokens",
    "linear",
    sum_of_products=lambda m, h, g: (h * g).sum(-1),
    mean_of_products_kept=lambda m, h, g: (h * g).mean(-1, keepdim=True) * g.new_ones(4),
    sum_of_products_of_tokens_with_queries=lambda m, h, g: (h[:, :, None] * g[:, None]).sum(-1),
    product_summed_twice=lambda m, h, g: (p := h * g).sum(-1) + p.mean(-1),
    product_of_vectors_summed=lambda m, h, g: (h[0, 0] * g[0, 0]).sum(),
    pad_units_number=lambda m, h, g: fn.pad(h, (1, 0), value=0.7),
)
add(
    "tokens",
    "scaled",
    product_summed_over_tokens=lambda m, h, g: (h * g).sum(1),
    product_summed_and_read=lambda m, h, g: (p := h * g).sum(-1).sum() * p.relu(),
)
add(
    "tokens",
    "orthogonal",
    cosine_similarity=lambda m, h, g: fn.cosine_similarity(h, g, -1),
    cosine_of_all_pairs=lambda m, h, g: fn.cosine_similarity(h[:, :, None], g[:, None], dim=-1),
    cosine_written_out=lambda m, h, g: (fn.normalize(h, dim=-1) * fn.normalize(g, dim=-1)).sum(-1),
    linalg_vector_norm=lambda m, h, g: torch.linalg.vector_norm(h, 2, -1),
    norm=lambda m, h, g: ops.norm(h, 2, [-1], True) * h,
    frobenius_norm=lambda m, h, g: ops.frobenius_norm(h, [2]),
    sum_of_squares=lambda m, h, g: h.square().sum(-1),
    mean_of_products=lambda m, h, g: h * (h * h).mean(-1, keepdim=True),
    rms_norm=lambda m, h, g: fn.rms_norm(h, (6,)),
    _fused_rms_norm=lambda m, h, g: ops._fused_rms_norm(h, [6], None, 1e-6)[0],
)
add(
    "tokens",
    "signed",
    norm_1=lambda m, h, g: h.norm(p=1, dim=-1),
    norm_with_a_bound=lambda m, h, g: h.norm(dim=1).clamp_min(1e-12),
    norm_with_a_large_bound=lambda m, h, g: h / h.norm(dim=1, keepdim=True).clamp_min(0.1),
    norm_inf=lambda m, h, g: h.norm(p=float("inf"), dim=-1),
    norm_of_two_axes=lambda m, h, g: torch.linalg.vector_norm(h, 2, (1, 2)),
    square_of_two_axes=lambda m, h, g: (h * h).sum((1, 2)),
)
add(
    "tokens",
    "scaled",
    rms_norm_gain=lambda m, h, g: fn.rms_norm(h, (6,), m.p(6)),
)
add(
    "tokens",
    "permutation",
    product_with_one_number=lambda m, h, g: (h * g.sum(-1, keepdim=True)).sum(-1).exp()[..., None] * h.amax((0, 1)),
    norm_0=lambda m, h, g: torch.linalg.vector_norm(h.relu(), 0, 1),
    values_with_a_bound=lambda m, h, g: 1 / h.relu().clamp_min(1e-12),
)
add(
    "tokens",
    "frozen",
    cumsum_of_units=lambda m, h, g: h.cumsum(-1),
    cumprod_of_units=lambda m, h, g: h.cumprod(2),
    unfold_units=lambda m, h, g: h.unfold(-1, 3, 1),
    fft_of_units=lambda m, h, g: ops.view_as_real(torch.fft.fft(h)),
    fft_of_all=lambda m, h, g: ops.view_as_real(torch.fft.fftn(h)),
    fft_of_last=lambda m, h, g: ops.view_as_real(torch.fft.fftn(h, s=(5, 6))),
    sum_as_integer=lambda m, h, g: ops.sum.dim_IntList(3 * h, [1], False, dtype=torch.int64),
    argmax_as_number=lambda m, h, g: h.argmax(-1),
    topk_unsorted=lambda m, h, g: h.topk(3, -1, sorted=False).values,
)

# Norms

add(
    "tokens",
    "permutation",
    softmax=lambda m, h, g: h.softmax(-1),
    _softmax=lambda m, h, g: ops._softmax(h, -1, False),
    _safe_softmax=lambda m, h, g: ops._safe_softmax(h, 1),
    log_softmax=lambda m, h, g: h.log_softmax(1),
    _log_softmax=lambda m, h, g: ops._log_softmax(h, -1, False),
    softmax_float=lambda m, h, g: h.softmax(-1, dtype=torch.float32),
)
add(
    "tokens",
    "scaled",
    native_layer_norm=lambda m, h, g: ops.native_layer_norm(h, [6], m.p(6), None, 1e-5)[0],
)
add(
    "tokens",
    "nested",
    layer_norm_two=lambda m, h, g: fn.layer_norm(h, (5, 6), m.p(5, 6)),
)
add(
    "tokens",
    "scaled",
    layer_norm=lambda m, h, g: fn.layer_norm(h, (6,), m.p(6), m.p(6, tag="b")),
)
add(
    "line",
    "scaled",
    batch_norm=lambda m, h, g: fn.batch_norm(h, m.mean, m.var, m.p(8), m.p(8, tag="b")).relu(),
    batch_norm_plain=lambda m, h, g: fn.batch_norm(h, m.mean, m.var).relu(),
    _native_batch_norm_legit_no_training=lambda m, h, g: ops._native_batch_norm_legit_no_training(
        h, m.p(8), m.p(8, tag="b"), m.mean, m.var, 0.1, 1e-5
    )[0],
    native_batch_norm=lambda m, h, g: ops.native_batch_norm(h, m.p(8), None, m.mean, m.var, False, 0.1, 1e-5)[0],
    instance_norm_running=lambda m, h, g: fn.instance_norm(h, m.mean, m.var, m.p(8), use_input_stats=False).relu(),
)
add(
    "line",
    "signed",
    batch_norm_training=lambda m, h, g: fn.batch_norm(h, None, None, training=True),
    instance_norm=lambda m, h, g: fn.instance_norm(h, eps=0.1),
    group_norm_of_one=lambda m, h, g: fn.group_norm(h, 8),
)
add(
    "line",
    "nested scaled",
    native_group_norm=lambda m, h, g: ops.native_group_norm(h, m.p(8), None, 2, 8, 7, 4, 1e-5)[0],
)
add(
    "line",
    "nested scaled",
    group_norm=lambda m, h, g: fn.group_norm(h, 2, m.p(8), m.p(8, tag="b")),
)
add("line", "scaled", group_norm_of_all=lambda m, h, g: fn.group_norm(h, 1, m.p(8)))
add("rows", "orthogonal", _weight_norm=lambda m, h, g: fn.linear(h, torch._weight_norm(m.p(7, 6), m.p(7, 1), 0)))
add("rows", "scaled", _weight_norm_of_columns=lambda m, h, g: fn.linear(h, torch._weight_norm(m.p(7, 6), m.p(1, 6), 1)))

# Views

add(
    "tokens",
    "linear",
    view=lambda m, h, g: h.view(15, 6).view(3, 5, 6),
    _unsafe_view=lambda m, h, g: ops._unsafe_view(h, [3, 30]),
    reshape=lambda m, h, g: h.reshape(3, 30),
    flatten=lambda m, h, g: h.flatten(0, 1),
    view_as=lambda m, h, g: h.view(3, 30).view_as(g),
    reshape_as=lambda m, h, g: h.reshape(-1).reshape_as(g),
    _reshape_alias=lambda m, h, g: ops._reshape_alias(h, [3, 30], [30, 1]),
    permute=lambda m, h, g: h.permute(2, -3, 1),
    transpose=lambda m, h, g: h.transpose(-1, 0),
    swapaxes=lambda m, h, g: ops.swapaxes(h, 0, 1),
    swapdims=lambda m, h, g: ops.swapdims(h, 0, -1),
    mT=lambda m, h, g: ops.mT(h) @ g,
    adjoint=lambda m, h, g: ops.adjoint(h),
    numpy_T=lambda m, h, g: ops.numpy_T(h),
    movedim=lambda m, h, g: h.movedim(-1, 0),
    moveaxis=lambda m, h, g: ops.moveaxis(h, [2, 0], [0, 1]),
    unsqueeze=lambda m, h, g: h.unsqueeze(-2),
    squeeze=lambda m, h, g: h.unsqueeze(0).squeeze(0).unsqueeze(2).squeeze(),
    squeeze_dims=lambda m, h, g: ops.squeeze.dims(h[:, None, :, None], [1, -2]),
    broadcast_to=lambda m, h, g: torch.broadcast_to(h, (2, 3, 5, 6)).sum(0),
    expand=lambda m, h, g: h.expand(3, 5, 6),
    expand_new=lambda m, h, g: h[:, None].expand(-1, 2, -1, -1).mean(1),
    expand_as=lambda m, h, g: h[:, :1].expand_as(g),
    broadcast_tensors=lambda m, h, g: torch.broadcast_tensors(h, m.p(6)),
    narrow=lambda m, h, g: h.narrow(1, -2, 2),
    slice=lambda m, h, g: h[:, 1:-1],
    slice_with_step=lambda m, h, g: h[:, ::2],
    select=lambda m, h, g: h[:, -1],
    unbind=lambda m, h, g: h.unbind(1)[2],
    split=lambda m, h, g: h.split(2, 1),
    split_with_sizes=lambda m, h, g: h.split([1, 4], 1)[1],
    chunk=lambda m, h, g: h.chunk(2, 1),
    tensor_split=lambda m, h, g: ops.tensor_split(h, 2, 1),
    tensor_split_at=lambda m, h, g: ops.tensor_split.indices(h, [1, 3], 1),
    unsafe_split=lambda m, h, g: ops.unsafe_split(h, 2, 1),
    unsafe_chunk=lambda m, h, g: ops.unsafe_chunk(h, 2, 1),
    hsplit=lambda m, h, g: ops.hsplit(h, [2, 3]),
    vsplit=lambda m, h, g: ops.vsplit(h, [1, 2])[1],
    cat=lambda m, h, g: torch.cat([h, g], 1),
    cat_units=lambda m, h, g: torch.cat([h, g.relu(), h], -1),
    cat_zeros=lambda m, h, g: torch.cat([h, torch.zeros_like(h)], 1),
    concat=lambda m, h, g: ops.concat([h, g], -1),
    concatenate=lambda m, h, g: ops.concatenate([h, g], -1),
    stack=lambda m, h, g: torch.stack([h, g.relu()], 1)[:, 0] + h,
    pad=lambda m, h, g: fn.pad(h, (1, 2)),
    pad_tokens=lambda m, h, g: fn.pad(h, (0, 0, 1, 1)),
    constant_pad_nd=lambda m, h, g: ops.constant_pad_nd(h, [0, 0, 2, 0], 0),
    flip=lambda m, h, g: h.flip(1),
    roll=lambda m, h, g: h.roll(2, 1),
    tril=lambda m, h, g: h[:, None].expand(3, 5, 5, 6).movedim(-1, 1).tril(),
    slice_scatter=lambda m, h, g: torch.slice_scatter(h, g[:, :2], 1, 1, 3),
    select_scatter=lambda m, h, g: torch.select_scatter(h, g[:, 0], 1, -2),
    copy=lambda m, h, g: ops.copy(torch.zeros(3, 5, 6, dtype=h.dtype), h),
    repeat=lambda m, h, g: h.repeat(1, 2, 1),
    tile=lambda m, h, g: ops.tile(h, [2, 1]),
    repeat_interleave=lambda m, h, g: h.repeat_interleave(2, 1),
    index=lambda m, h, g: h[:, torch.tensor([0, 2, 2])],
    index_two=lambda m, h, g: h[torch.tensor([0, 1, 2]), torch.tensor([1, 1, 4])],
    index_select=lambda m, h, g: h.index_select(1, torch.tensor([3, 1])),
    index_add=lambda m, h, g: h.index_add(1, torch.tensor([4, 1]), g[:, :2], alpha=2),
    index_add_zeros=lambda m, h, g: torch.zeros(3, 4, 6, dtype=h.dtype).index_add(1, torch.tensor([1, 1, 3, 0, 2]), h),
    index_put=lambda m, h, g: h.index_put([torch.tensor([2, 0])], g[:2]),
    index_put_both=lambda m, h, g: h.index_put([torch.tensor([2, 0]), torch.tensor([1, 4])], g[0, :2], accumulate=True),
    index_put_zero=lambda m, h, g: h.index_put([torch.eye(3, 5) > 0], torch.zeros((), dtype=h.dtype)) + g,
    masked_scatter_rows=lambda m, h, g: h.masked_scatter((torch.eye(3, 5) > 0)[..., None], g.flatten(0, 1)),
    masked_scatter=lambda m, h, g: h.masked_scatter((torch.eye(3, 5) > 0)[..., None].expand_as(h), g[0]),
)
add(
    "rows",
    "linear",
    matrix_H=lambda m, h, g: ops.matrix_H(h),
    t=lambda m, h, g: ops.t(h).sum(1),
    dsplit=lambda m, h, g: ops.dsplit(h[..., None], 1)[0],
)
add(
    "tokens",
    "linear scaled",
    slice_units=lambda m, h, g: torch.cat([h[..., :2].relu(), h[..., 2:]], -1),
)
add(
    "tokens",
    "permutation",
    pad_number=lambda m, h, g: fn.pad(h, (0, 0, 1, 0), value=0.7),
    pad_units_and_tokens_number=lambda m, h, g: fn.pad(h, (0, 2, 1, 0), value=0.7),
    index_put_number=lambda m, h, g: h.index_put([torch.tensor([2, 0])], torch.tensor(0.7, dtype=h.dtype)),
    gather=lambda m, h, g: g.gather(-1, h.argmax(-1, keepdim=True)),
)
add(
    "tokens",
    "scaled",
    scatter_source=lambda m, h, g: torch.zeros_like(h).scatter(-1, h.topk(2).indices, h.topk(2).values) * g,
)
add(
    "tokens",
    "scaled",
    scatter=lambda m, h, g: torch.zeros_like(h).scatter(-1, h.topk(2).indices, 1.0) * g,
)
add(
    "tokens",
    "scaled",
    one_hot=lambda m, h, g: fn.one_hot(h.argmax(-1), 6) * g,
)
add(
    "tokens",
    "nested",
    repeat_each_unit=lambda m, h, g: h.sigmoid().repeat_interleave(2, -1),
)
add(
    "tokens",
    "nested",
    repeat_units=lambda m, h, g: h.sigmoid().repeat(1, 1, 2),
)
add(
    "tokens",
    "frozen",
    flip_units=lambda m, h, g: h.flip(-1),
    roll_units=lambda m, h, g: h.roll(1, -1),
    roll_flat=lambda m, h, g: h.roll(1),
    triu=lambda m, h, g: h.triu(),
    index_add_units=lambda m, h, g: h.index_add(-1, torch.tensor([4, 1]), g[..., :2]),
    index_put_units=lambda m, h, g: h.movedim(-1, 0).index_put([torch.tensor([2, 0])], g.movedim(-1, 0)[:2]),
    masked_scatter_units=lambda m, h, g: h.masked_scatter((torch.eye(5, 6) > 0), g[0]),
    index_units=lambda m, h, g: h[..., torch.tensor([0, 5, 1])],
    index_across=lambda m, h, g: h[torch.tensor([0, 1]), :, torch.tensor([1, 5])],
)
add(
    "tokens",
    "nested permutation",
    view_of_heads=lambda m, h, g: h.unflatten(-1, (3, 2)).softmax(-2).flatten(-2),
)
add(
    "tokens",
    "nested rotation",
    view_as_complex=lambda m, h, g: ops.view_as_real(
        ops.view_as_complex(h.unflatten(-1, (3, 2))) * torch.tensor([1j, 2, 1 + 1j], dtype=torch.complex128)
    ),
)
add(
    "rows",
    "linear",
    complex=lambda m, h, g: ops.view_as_real(torch.complex(h, g)),
    complex_weights_of_two_tensors=lambda m, h, g: ops.view_as_real(
        torch.complex(h, g) @ torch.complex(m.p(6, 4), m.p(6, 4, tag="b"))
    ),
)
add(
    "rows", "signed", view_as_real=lambda m, h, g: ops.view_as_real(ops.view_as_complex(h.unflatten(-1, (3, 2)))).tanh()
)
add("tokens", "nested permutation", unfold_blocks=lambda m, h, g: fn.rms_norm(h.unfold(-1, 2, 2), (2,)).exp())
add("tokens", "nested permutation", unflatten=lambda m, h, g: fn.rms_norm(ops.unflatten(h, -1, [3, 2]), (2,)).exp())

# Products

add(
    "tokens",
    "linear",
    matmul=lambda m, h, g: h @ m.p(6, 4),
    matmul_batched=lambda m, h, g: torch.matmul(h, m.p(3, 6, 4)),
    matmul_vector=lambda m, h, g: h @ m.p(6),
    matmul_from_left=lambda m, h, g: m.p(4, 5) @ h,
    bmm=lambda m, h, g: torch.bmm(h, g.mT),
    baddbmm=lambda m, h, g: torch.baddbmm(m.p(5), h, g.mT, beta=0.5, alpha=2),
    linear=lambda m, h, g: fn.linear(h, m.p(7, 6), m.p(7)),
    linear_of_vector=lambda m, h, g: ops.linear(h, m.p(6)),
    einsum=lambda m, h, g: torch.einsum("btd,de->bte", h, m.p(6, 4)),
    einsum_ellipsis=lambda m, h, g: torch.einsum("...d,...d->...", h, m.p(6)),
    einsum_implicit=lambda m, h, g: torch.einsum("btd,dA", h, m.p(6, 4)),
    einsum_of_tokens=lambda m, h, g: torch.einsum("btd,bsd->bts", h, g),
    einsum_broadcast=lambda m, h, g: torch.einsum("...td,...de->...te", h, m.p(1, 6, 4)),
    einsum_sum=lambda m, h, g: torch.einsum("btd->bd", h),
    bilinear=lambda m, h, g: fn.bilinear(h, g, m.p(2, 6, 6), m.p(2)),
)
add(
    "rows",
    "linear",
    mm=lambda m, h, g: torch.mm(h, m.p(6, 4)),
    mv=lambda m, h, g: torch.mv(h, m.p(6)),
    addmm=lambda m, h, g: torch.addmm(m.p(4), h, m.p(6, 4), alpha=-1),
    addmm_without=lambda m, h, g: torch.addmm(m.p(4), h, m.p(6, 4), beta=0),
    addmv=lambda m, h, g: torch.addmv(m.p(5), h, m.p(6), beta=2),
    outer=lambda m, h, g: torch.outer(h[0], m.p(4)),
    ger=lambda m, h, g: ops.ger(m.p(4), h[1]),
    dot=lambda m, h, g: torch.dot(h[0], m.p(6)),
    vdot=lambda m, h, g: torch.vdot(h[0], g[1]),
)
add(
    "tokens",
    "scaled",
    einsum_elementwise=lambda m, h, g: torch.einsum("btd,btd->btd", h, g),
    einsum_thrice=lambda m, h, g: torch.einsum("btd,btd,d->bt", h, g, m.p(6)),
)
add("tokens", "permutation", einsum_sum_of_units=lambda m, h, g: torch.einsum("btd->bt", h))
add("tokens", "orthogonal", matmul_itself=lambda m, h, g: h @ h.mT, bilinear_itself=lambda m, h, g: (h * h).sum(-1))
add("rows", "frozen", einsum_diagonal=lambda m, h, g: torch.einsum("dd,bd->b", m.p(6, 6), h))
add(
    "line",
    "linear",
    conv1d=lambda m, h, g: fn.conv1d(h, m.p(5, 8, 3), m.p(5), 2, 1),
    conv1d_pointwise=lambda m, h, g: fn.conv1d(h, m.p(5, 8, 1)),
    conv1d_unbatched=lambda m, h, g: fn.conv1d(h[0], m.p(5, 8, 3), m.p(5), padding="same"),
    conv_transpose1d=lambda m, h, g: fn.conv_transpose1d(h, m.p(8, 3, 2), m.p(3), 2, output_padding=1),
    convolution=lambda m, h, g: ops.convolution(h, m.p(5, 8, 3), None, [1], [0], [2], False, [0], 1),
    _convolution=lambda m, h, g: ops._convolution.deprecated(
        h, m.p(8, 3, 2), None, [2], [1], [1], True, [0], 1, False, False, False
    ),
)
add("image", "linear", conv2d=lambda m, h, g: fn.conv2d(h, m.p(5, 8, 3, 3), m.p(5), dilation=2))
add("image", "linear", conv_transpose2d=lambda m, h, g: fn.conv_transpose2d(h, m.p(8, 5, 2, 2), m.p(5), 2))
add("volume", "linear", conv3d=lambda m, h, g: fn.conv3d(h, m.p(3, 4, 2, 2, 2), m.p(3)))
add("volume", "linear", conv_transpose3d=lambda m, h, g: fn.conv_transpose3d(h, m.p(4, 3, 2, 2, 2), m.p(3)))
add(
    "line",
    "linear nested",
    conv_grouped=lambda m, h, g: fn.conv1d(h, m.p(6, 4, 3), m.p(6), groups=2),
    conv_transposed_grouped=lambda m, h, g: fn.conv_transpose1d(h, m.p(8, 3, 2), m.p(6), groups=2),
)
add("line", "scaled", conv_depthwise=lambda m, h, g: fn.conv1d(h, m.p(8, 1, 3), m.p(8), groups=8))

# Attention and recurrence


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


add(
    "tokens",
    "linear nested",
    scaled_dot_product_attention=lambda m, h, g: fn.scaled_dot_product_attention(
        heads(h, 3), heads(g, 3), heads(m.p(3, 5, 6), 3), is_causal=True
    ),
    attention_grouped=lambda m, h, g: fn.scaled_dot_product_attention(
        heads(fn.linear(g, m.p(12, 6)), 6), heads(h, 3), heads(h, 3), enable_gqa=True
    ),
)
add(
    "tokens",
    "nested signed",
    attention_with_mask=lambda m, h, g: fn.scaled_dot_product_attention(
        heads(h, 3), heads(g, 3), heads(g.tanh(), 3), m.p(5, 5) > 0, scale=0.3
    ),
)
add("tokens", "linear", attention_unsplit=lambda m, h, g: fn.scaled_dot_product_attention(g, g, h))


def _weights(m: Between, gates: int, size: int = 4) -> list[Tensor]:
    rows = gates * size
    return [m.p(rows, 6), m.p(rows, size), m.p(rows), m.p(rows, tag="b")]


def _state(h: Tensor, size: int = 4, count: int = 1) -> Tensor:
    return torch.zeros(count, h.shape[0], size, dtype=h.dtype)


def _projected(m: Between, ways: int) -> list[Tensor]:
    """Return weights of an LSTM of four units, projected to three, with biases for one direction and without biases for
    two.
    """
    weights = [m.p(16, 6), m.p(16, 3), *([m.p(16), m.p(16, tag="b")] if ways == 1 else []), m.p(3, 4)]
    return [*weights, *(w.flip(0) for w in weights)] if ways == 2 else weights


add(
    "tokens",
    "linear",
    lstm=lambda m, h, g: ops.lstm(h, [_state(h), _state(h)], _weights(m, 4), True, 1, 0.0, False, False, True),
    lstm_projected=lambda m, h, g: ops.lstm(
        h, [_state(h, 3), _state(h)], _projected(m, 1), True, 1, 0.0, False, False, True
    ),
    lstm_projected_both_ways=lambda m, h, g: ops.lstm(
        h, [_state(h, 3, 2), _state(h, 4, 2)], _projected(m, 2), False, 1, 0.0, False, True, True
    )[0],
    gru=lambda m, h, g: ops.gru(h, _state(h), _weights(m, 3), True, 1, 0.0, False, False, True)[0],
    rnn_tanh=lambda m, h, g: ops.rnn_tanh(h, _state(h), _weights(m, 1), True, 1, 0.0, False, False, True),
    rnn_relu=lambda m, h, g: ops.rnn_relu(h, _state(h), _weights(m, 1), True, 1, 0.0, False, False, True)[0],
    gru_without_bias=lambda m, h, g: ops.gru(h, _state(h), _weights(m, 3)[:2], False, 1, 0.0, False, False, True),
    gru_both_ways=lambda m, h, g: ops.gru(
        h, m.p(2, 3, 4), [*_weights(m, 3), *(w.flip(0) for w in _weights(m, 3))], True, 1, 0.0, False, True, True
    ),
)
add(
    "rows",
    "linear",
    lstm_cell=lambda m, h, g: ops.lstm_cell(h, [_state(h)[0], _state(h)[0]], *_weights(m, 4)),
    gru_cell=lambda m, h, g: ops.gru_cell(h, fn.linear(g, m.p(4, 6)), *_weights(m, 3)),
    rnn_tanh_cell=lambda m, h, g: ops.rnn_tanh_cell(h, _state(h)[0], *_weights(m, 1)),
    rnn_relu_cell=lambda m, h, g: ops.rnn_relu_cell(h, _state(h)[0], *_weights(m, 1)),
)
add("rows", "linear", gru_cell_state=lambda m, h, g: ops.gru_cell(m.p(5, 6), h @ m.p(6, 4), *_weights(m, 3)))
add(
    "tokens",
    "permutation",
    embedding=lambda m, h, g: (
        fn.embedding(h.argmax(-1), m.p(6, 3)) + fn.embedding(torch.tensor([0, 1, 1, 0, 2]), m.p(6, 3, tag="b"))
    ),
)

# Pooling, resampling, patches

for _name, _where, _args in (
    ("max_pool1d", "line", (2,)), ("max_pool2d", "image", (3, 2, 1, 1, True)), ("max_pool3d", "volume", (2,)),
):  # fmt: skip
    add(_where, "scaled", **{_name: lambda m, h, g, n=_name, a=_args: getattr(fn, n)(h, *a)})
for _name, _where, _args in (
    ("avg_pool1d", "line", (3, 2, 1)), ("avg_pool2d", "image", (3, 2, 1, True, False)), ("avg_pool3d", "volume", (2,)),
    ("adaptive_avg_pool1d", "line", (3,)), ("adaptive_avg_pool2d", "image", (2,)),
    ("adaptive_avg_pool3d", "volume", (1,)),
):  # fmt: skip
    add(_where, "linear", **{_name: lambda m, h, g, n=_name, a=_args: getattr(fn, n)(h, *a)})
for _name, _where, _size in (
    ("adaptive_max_pool1d", "line", [3]), ("adaptive_max_pool2d", "image", [1, 1]),
    ("adaptive_max_pool3d", "volume", [2, 2, 2]),
):  # fmt: skip
    add(_where, "scaled", **{_name: lambda m, h, g, n=_name, s=_size: getattr(ops, n)(h, s)[0]})
for _name, _where, _size in (
    ("upsample_nearest1d", "line", [9]), ("upsample_nearest2d", "image", [12, 9]),
    ("upsample_nearest3d", "volume", [8, 4, 4]), ("_upsample_nearest_exact2d", "image", [7, 7]),
    ("_adaptive_avg_pool2d", "image", [2, 1]), ("_adaptive_avg_pool3d", "volume", [2, 2, 1]),
):  # fmt: skip
    add(_where, "linear", **{_name: lambda m, h, g, n=_name, s=_size: getattr(ops, n)(h, s)})
for _name, _where, _size in (
    ("upsample_linear1d", "line", [9]), ("upsample_bilinear2d", "image", [9, 4]),
    ("upsample_bicubic2d", "image", [9, 4]), ("upsample_trilinear3d", "volume", [8, 4, 3]),
    ("_upsample_bilinear2d_aa", "image", [4, 3]), ("_upsample_bicubic2d_aa", "image", [4, 3]),
):  # fmt: skip
    add(_where, "linear", **{_name: lambda m, h, g, n=_name, s=_size: getattr(ops, n)(h, s, False)})
add(
    "image",
    "scaled",
    max_pool2d_with_indices=lambda m, h, g: ops.max_pool2d_with_indices(h, [2, 2])[0],
    max_pool_unbatched=lambda m, h, g: fn.max_pool2d(h[0], 2),
)
add("rows", "linear", slice_of_nothing=lambda m, h, g: torch.cat([h[:, :6], h[:, 6:] * 2], 1))
add("tokens", "linear", avg_pool_of_tokens=lambda m, h, g: fn.avg_pool2d(h[:, None], (2, 1)).squeeze(1))
add("tokens", "scaled", max_pool_of_tokens=lambda m, h, g: fn.max_pool2d(h[:, None], (2, 1), (1, 1)).squeeze(1))
add("tokens", "frozen", avg_pool_of_every_second=lambda m, h, g: fn.avg_pool2d(h[:, None], (2, 1), (1, 2)).squeeze(1))
add("image", "scaled", max_pool_indices=lambda m, h, g: ops.max_pool2d_with_indices(h, [2, 2])[1] / 36)
add("image", "linear", global_average=lambda m, h, g: fn.adaptive_avg_pool2d(h, 1))
add("volume", "scaled", max_pool3d_with_indices=lambda m, h, g: ops.max_pool3d_with_indices(h, [2, 2, 2])[0])
add(
    "image",
    "linear",
    reflection_pad2d=lambda m, h, g: ops.reflection_pad2d(h, [1, 1, 0, 2]),
    replication_pad2d=lambda m, h, g: ops.replication_pad2d(h, [1, 1, 0, 2]),
    pad_circular=lambda m, h, g: fn.pad(h, (1, 1, 1, 1), mode="circular"),
    pad_negative=lambda m, h, g: fn.pad(h, (-1, 1)),
    im2col=lambda m, h, g: fn.unfold(h, 3, stride=2),
    unfold_image=lambda m, h, g: h.unfold(2, 3, 1).unfold(3, 2, 2),
    fft_fft2=lambda m, h, g: ops.view_as_real(torch.fft.fft2(h)),
    fft_ifft2=lambda m, h, g: ops.view_as_real(torch.fft.ifft2(torch.fft.fft2(h))),
    fft_rfft2=lambda m, h, g: ops.view_as_real(torch.fft.rfft2(h, norm="ortho")),
    fft_irfft2=lambda m, h, g: torch.fft.irfft2(torch.fft.rfft2(h)),
    fft_fftn=lambda m, h, g: ops.view_as_real(torch.fft.fftn(h, dim=(2, 3))),
    fft_ifftn=lambda m, h, g: ops.view_as_real(torch.fft.ifftn(torch.fft.fft2(h), s=(4, 3))),
    fft_rfftn=lambda m, h, g: torch.fft.irfftn(torch.fft.rfftn(h, dim=(2, 3)), dim=(3, 2)),
    _fft_c2c=lambda m, h, g: ops._fft_c2r(ops._fft_c2c(ops._fft_r2c(h, [2], 0, True), [3], 1, True), [2], 0, 6),
    pixel_unshuffle=lambda m, h, g: fn.pixel_unshuffle(h, 2),
)
add(
    "line",
    "linear",
    reflection_pad1d=lambda m, h, g: ops.reflection_pad1d(h, [1, 2]),
    replication_pad1d=lambda m, h, g: ops.replication_pad1d(h, [1, 2]),
)
add("image", "linear", pixel_shuffle=lambda m, h, g: fn.pixel_shuffle(h, 2))
add("image", "linear", channel_shuffle=lambda m, h, g: fn.channel_shuffle(h, 2))
add("image", "linear", native_channel_shuffle=lambda m, h, g: ops.native_channel_shuffle(h, 4))


# Rows that are addressed by number: graphs, segments, bags

ROWS_TO = torch.tensor([0, 2, 1, 0, 2])
BAGS = torch.tensor([[0, 1], [1, 2], [3, 0], [1, 1], [2, 2]])


def _to(h: Tensor, rows: Tensor = ROWS_TO) -> Tensor:
    """Return positions of whole rows, in the form that `scatter` accepts."""
    return rows.view(-1, 1).expand(-1, h.shape[1])


def _reduced(how: str, *, start: float = 0.0, include: bool = True) -> Operator:
    def operator(m: Between, h: Tensor, g: Tensor) -> Tensor:
        blank = torch.full((3, 6), start, dtype=h.dtype)
        return blank.scatter_reduce(0, _to(h), h, how, include_self=include)

    return operator


def _by_index(how: str) -> Operator:
    return lambda m, h, g: g.index_reduce(0, torch.tensor([1, 1, 3]), h[:3], how)


def _segments(how: str) -> Operator:
    return lambda m, h, g: torch.segment_reduce(h, how, lengths=torch.tensor([2, 3]))


FEW = torch.tensor([1, 3])
add(
    "rows",
    "linear",
    scatter_add=lambda m, h, g: torch.zeros(3, 6, dtype=h.dtype).scatter_add(0, _to(h), h),
    scatter_add_repeated=lambda m, h, g: g.scatter_add(0, ROWS_TO[:, None].repeat(1, 6), h),
    scatter_add_to_others=lambda m, h, g: g.scatter_add(0, _to(h), h),
    scatter_add_by_weight=lambda m, h, g: m.p(3, 6).scatter_add(0, _to(h), m.p(5, 1) * h),
    scatter_reduce_sum=_reduced("sum"),
    scatter_reduce_mean=_reduced("mean"),
    scatter_reduce_mean_of_others=_reduced("mean", include=False),
    scatter_rows=lambda m, h, g: h.scatter(0, _to(h, FEW), g[:2]),
    scatter_zero_rows=lambda m, h, g: h.scatter(0, _to(h, FEW), 0.0),
    index_copy=lambda m, h, g: h.index_copy(0, FEW, g[:2]),
    index_fill=lambda m, h, g: h.index_fill(0, FEW, 0.0),
    index_reduce_mean=_by_index("mean"),
    segment_reduce=_segments("sum"),
    segment_mean=_segments("mean"),
    embedding_bag=lambda m, h, g: fn.embedding_bag(BAGS, m.p(4, 6)) + h,
    embedding_bag_sum=lambda m, h, g: fn.embedding_bag(BAGS, m.p(4, 6), mode="sum") + h,
    embedding_bag_weighted=lambda m, h, g: (
        fn.embedding_bag(BAGS, m.p(4, 6), mode="sum", per_sample_weights=m.p(5, 2)) + h
    ),
    embedding_bag_padded=lambda m, h, g: fn.embedding_bag(BAGS, m.p(4, 6), padding_idx=1) + h,
)
add(
    "rows",
    "scaled",
    scatter_reduce_amax=_reduced("amax", include=False),
    scatter_reduce_amin=_reduced("amin"),
    index_reduce=_by_index("amax"),
    segment_max=_segments("max"),
    embedding_bag_max=lambda m, h, g: fn.embedding_bag(BAGS, m.p(4, 6), mode="max") + h,
)
add(
    "rows",
    "permutation",
    scatter_reduce_prod=_reduced("prod", start=1.0),
    scatter_reduce_amax_of_ones=_reduced("amax", start=1.0),
    scatter_reduce_sum_on_ones=_reduced("sum", start=1.0),
    scatter_number_in_rows=lambda m, h, g: h.scatter(0, _to(h, FEW), 0.7),
    cdist_codebook_on_a_sphere=lambda m, h, g: m.p(7, 4)[
        torch.cdist(h.relu(), fn.rms_norm(m.p(7, 6), (6,))).argmin(-1)
    ],
    cdist_codebook_rectified=lambda m, h, g: m.p(7, 4)[torch.cdist(h.relu(), m.p(7, 6).relu()).argmin(-1)],
    index_fill_number=lambda m, h, g: h.index_fill(0, FEW, 0.7),
    index_reduce_prod=_by_index("prod"),
    segment_product=_segments("prod"),
    segment_max_from_one=lambda m, h, g: torch.segment_reduce(h, "max", lengths=torch.tensor([2, 3]), initial=0.1),
)
add(
    "rows",
    "frozen",
    scatter_add_units=lambda m, h, g: h.scatter_add(1, torch.tensor([[0, 1, 1, 2, 3, 5]]).expand(5, -1), g),
    scatter_add_crossed=lambda m, h, g: g.scatter_add(0, torch.arange(30).view(5, 6) % 5, h),
    index_fill_units=lambda m, h, g: h.index_fill(1, FEW, 0.0),
    segments_of_units=lambda m, h, g: torch.segment_reduce(h.T.contiguous(), "sum", lengths=torch.tensor([2, 4])),
)

# Distances and norms of matrices

add(
    "rows",
    "orthogonal",
    cdist=lambda m, h, g: torch.cdist(h, m.p(7, 6)),
    cdist_codebook=lambda m, h, g: m.p(7, 6)[torch.cdist(h, m.p(7, 6)).argmin(-1)],
    cdist_codebook_of_batch=lambda m, h, g: m.p(7, 6)[torch.cdist(h[None], m.p(7, 6)[None])[0].argmin(-1)],
    cdist_codebook_chosen=lambda m, h, g: fn.one_hot((-torch.cdist(h, m.p(7, 6))).argmax(-1), 7).double() @ m.p(7, 6),
    pdist=lambda m, h, g: fn.pdist(h),
    _weight_norm_of_all=lambda m, h, g: fn.linear(h, ops._weight_norm(m.p(4, 6), m.p(1)[0], -1)),
)
add("tokens", "orthogonal", cdist_of_batches=lambda m, h, g: torch.cdist(h, m.p(7, 6)))
add(
    "rows",
    "signed",
    cdist_by_magnitudes=lambda m, h, g: torch.cdist(h, m.p(7, 6), p=1.0),
    cdist_of_largest=lambda m, h, g: torch.cdist(h, m.p(7, 6), p=float("inf")),
    cdist_counted=lambda m, h, g: torch.cdist(h, m.p(7, 6), p=0.0),
    cdist_codebook_counted=lambda m, h, g: m.p(7, 4)[torch.cdist(h, m.p(7, 6), p=0.0).argmin(-1)],
    pdist_by_cubes=lambda m, h, g: fn.pdist(h, p=3.0),
    dist=lambda m, h, g: torch.dist(h, g),
    linalg_svdvals=lambda m, h, g: torch.linalg.svdvals(h),
    linalg_matrix_norm=lambda m, h, g: torch.linalg.matrix_norm(h, 2),
    matrix_norm_of_rows=lambda m, h, g: torch.linalg.matrix_norm(h, float("inf")),
)
add(
    "tokens",
    "linear",
    linalg_inv=lambda m, h, g: h @ torch.linalg.inv(m.p(6, 6)),
    inverse=lambda m, h, g: h @ torch.inverse(m.p(6, 6)),
    linalg_solve=lambda m, h, g: torch.linalg.solve(m.p(6, 6), h[0].T),
    solve_from_the_right=lambda m, h, g: torch.linalg.solve(m.p(6, 6), h[0], left=False),
    addbmm=lambda m, h, g: torch.addbmm(m.p(5, 4), h, m.p(3, 6, 4), beta=2, alpha=0.5),
    inner=lambda m, h, g: torch.inner(h, m.p(4, 6)),
)
add("tokens", "scaled", inverse_of_rectified=lambda m, h, g: h.relu() @ torch.linalg.inv(m.p(6, 6)))

# Ranks, ranges, and other functions of entries

add(
    "rows",
    "scaled",
    kthvalue=lambda m, h, g: h.kthvalue(2, 0).values,
    median=lambda m, h, g: h.median(0).values,
    nanmedian=lambda m, h, g: h.nanmedian(0).values,
    mode=lambda m, h, g: h.mode(0).values,
    copysign=lambda m, h, g: torch.copysign(h, g),
    copysign_number=lambda m, h, g: torch.copysign(h, -1.0),
    signbit=lambda m, h, g: h.signbit(),
)
add(
    "rows",
    "permutation",
    kthvalue_of_units=lambda m, h, g: h.kthvalue(2, 1).values,
    median_of_units=lambda m, h, g: h.median(1).values,
    chosen_by_median=lambda m, h, g: m.p(6, 3)[h.median(1).indices],
    median_of_all=lambda m, h, g: h.median(),
    histc=lambda m, h, g: h.histc(4, -2, 2),
    bucketize=lambda m, h, g: torch.bucketize(h, torch.tensor([-1.0, 0.0, 1.0], dtype=h.dtype)),
    searchsorted=lambda m, h, g: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=h.dtype), h),
    special_erfcx=lambda m, h, g: torch.special.erfcx(h),
)
add("rows", "signed", special_i0e=lambda m, h, g: torch.special.i0e(h))
add(
    "rows",
    "linear",
    ldexp=lambda m, h, g: torch.ldexp(h, torch.tensor(2)),
    hstack=lambda m, h, g: torch.hstack([h, g]),
    vstack=lambda m, h, g: torch.vstack([h, g[0]]),
    dstack=lambda m, h, g: torch.dstack([h, g]),
    column_stack=lambda m, h, g: torch.column_stack([h, g]),
)

# Images that are sampled, folded and unpooled


def _turned(h: Tensor) -> Tensor:
    """Rotate a grid by a fixed matrix."""
    space = h.ndim - 2
    matrix = 0.7 * torch.eye(space, space + 1, dtype=h.dtype).roll(1, 0)
    return fn.affine_grid(matrix.expand(len(h), -1, -1), list(h.shape), align_corners=False)


add(
    "image",
    "linear",
    grid_sampler=lambda m, h, g: fn.grid_sample(h, _turned(h), align_corners=False),
    grid_sampler_2d=lambda m, h, g: ops.grid_sampler_2d(h, _turned(h), 2, 1, True),
    grid_sampler_learned=lambda m, h, g: fn.grid_sample(h, m.p(2, 3, 3, 2).tanh(), align_corners=False),
    affine_grid_generator=lambda m, h, g: fn.grid_sample(
        h, fn.affine_grid(m.p(2, 2, 3), [2, 8, 3, 3], align_corners=False), align_corners=False
    ),
    col2im=lambda m, h, g: fn.fold(fn.unfold(h, 2), (6, 6), 2),
)
add(
    "image",
    "scaled",
    max_unpool2d=lambda m, h, g: ops.max_unpool2d(*ops.max_pool2d_with_indices(h, [2, 2], [2, 2]), [6, 6]),
)
add(
    "image",
    "permutation",
    grid_of_units=lambda m, h, g: fn.grid_sample(
        g, h.tanh().mean(1)[..., None].expand(-1, -1, -1, 2), align_corners=False
    ),
)
add(
    "line",
    "linear",
    _upsample_nearest_exact1d=lambda m, h, g: fn.interpolate(h, size=9, mode="nearest-exact"),
    _unsafe_index_put=lambda m, h, g: ops._unsafe_index_put(h, [torch.tensor([1, 0])], g),
)
add(
    "volume",
    "linear",
    _upsample_nearest_exact3d=lambda m, h, g: fn.interpolate(h, size=5, mode="nearest-exact"),
    grid_sampler_3d=lambda m, h, g: ops.grid_sampler_3d(h, _turned(h), 0, 0, False),
)
add(
    "volume",
    "scaled",
    max_unpool3d=lambda m, h, g: fn.max_unpool3d(*fn.max_pool3d(h, 2, return_indices=True), 2),
)
