"""Kinds of adapters next to LoRA, each a function from a matrix of the base to the merged one.

A matrix is `[out, in]`, of convolutions `[out, in/groups * kernel]`, and a bias `[out, 1]`. A kind says which tensors
it stores for a module, and what they make of its weight. `d` is the change, `s` is `alpha / rank`.

References:
    Liu et al. (2022), (IA)3, section 3.3; Hyeon-Woo et al. (2022), FedPara, whose Hadamard product LoHa takes; Yeh et
    al. (2024), LyCORIS, section 3 (LoHa and LoKr); Zhang et al. (2023), AdaLoRA, equation 3; Kopiczko et al. (2024),
    VeRA, equation 2; Yuan et al. (2024), HRA, section 3.1; Qiu et al. (2023), OFT, section 4, and Cayley's transform;
    Huang et al. (2025), HiRA, equation 2; Bhardwaj et al. (2024), SHiRA, section 4; Chen et al. (2024), C3A; Bini et
    al. (2025), DeLoRA, section 3; Gao et al. (2024), FourierFT, section 3; Kang and Yin (2024), MiSS; Petrushkov et al.
    (2024), RoAd, section 3.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regauge.checkpoints.formats.changes import Mapped, Replaced
from regauge.core.expressions import Expression

MOST_TERMS = 100
"""Terms of a series of powers at most."""

Parts: TypeAlias = Mapping[str, Tensor]
"""The tensors of one module, by the last part of their names."""
Config: TypeAlias = Mapping[str, Any]
Made: TypeAlias = Iterator[tuple[str, Mapped | Replaced]]
"""Changes of a module, each with the name of the tensor in it."""


@dataclass(frozen=True)
class Kind:
    """A kind of adapters: the names of its tensors in a module, and the changes that they make."""

    names: str
    make: Callable[[str, Parts, Config, Parts], Made]


@lru_cache(maxsize=2048)
def ending(pattern: str) -> Expression:
    """The expression for a key of a pattern in a configuration, which names modules by the ends of their paths."""
    return Expression(rf"(.*\.)?({pattern})")


def _added(change: Tensor) -> Mapped:
    """The change `W + d`, in whatever shape the entries of `d` come."""

    def add(weight: Tensor) -> Tensor:
        return weight + change.to(weight).reshape(weight.shape)

    sides = (change.shape[0], change[0].numel()) if change.ndim == 2 else None
    return Mapped(add, sides, change.numel())


def _scale(config: Config, module: str, rank: int) -> float:
    """The factor `alpha / rank`, with the alpha of the module."""
    patterns = config.get("alpha_pattern") or {}
    found = (one for key, one in patterns.items() if ending(key).fullmatch(module))
    return float(next(found, config.get("alpha", 8))) / rank


def _ia3(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`diag(l) W` and `l b`, or for a feed-forward module `W diag(l)`."""
    scale, listed = parts["ia3_l"].flatten(), config.get("feedforward_modules") or []
    is_inner = bool(Expression(listed).fullmatch(module)) if isinstance(listed, str) else module.endswith(tuple(listed))
    count = len(scale)

    def outer(weight: Tensor) -> Tensor:
        return weight * scale.to(weight)[:, None]

    def inner(weight: Tensor) -> Tensor:
        # Rows of groups of a convolution read inputs of their own.
        groups = scale.to(weight).reshape(-1, weight.shape[1])
        rows = groups.repeat_interleave(len(weight) // len(groups), 0)
        return weight * rows.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))

    yield "weight", Mapped(inner, keeps_shape=True) if is_inner else Mapped(outer, (count, None))
    if not is_inner:
        yield "bias", Mapped(outer, (count, 1), is_optional=True)


def _core(t: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A convolution's kernel from its core and the factors of its sides."""
    return torch.einsum("ijkl,ip,jr->prkl", t, a, b)


def _loha(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s (A B) * (C D)`, entry by entry."""
    p = {name: one.double() for name, one in parts.items()}
    pairs = []
    for k in "12":
        a, b = p[f"hada_w{k}_a"], p[f"hada_w{k}_b"]
        pairs.append(_core(p[f"hada_t{k}"], a, b) if f"hada_t{k}" in p else a @ b)
    yield "weight", _added(_scale(config, module, parts["hada_w1_b"].shape[0]) * pairs[0] * pairs[1])


def _lokr(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s A (x) B`, Kronecker's product; of kernels with one axis peft takes it over the last two axes."""
    p = {name.removeprefix("lokr_"): one.double() for name, one in parts.items()}
    first = p["w1"] if "w1" in p else p["w1_a"] @ p["w1_b"]
    if "w2_a" in p:
        p["w2"] = _core(p["t2"], p["w2_a"], p["w2_b"]) if "t2" in p else p["w2_a"] @ p["w2_b"]
    second = p["w2"]
    patterns = config.get("rank_pattern") or {}
    rank = next((one for key, one in patterns.items() if ending(key).fullmatch(module)), config.get("r", 8))
    first = first[..., None, None] if second.ndim == 4 else first
    yield "weight", _added(_scale(config, module, rank) * torch.kron(first, second.contiguous()))


def _adalora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = alpha / rank P diag(l) Q`."""
    p = {name: one.double() for name, one in parts.items()}
    rank = len(p["lora_E"]) + 1e-5  # peft adds this
    yield "weight", _added(p["lora_B"] @ (p["lora_E"] * p["lora_A"]) * (float(config.get("lora_alpha", 8)) / rank))


def _vera(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = diag(b) B diag(d) A`, where all modules share the rows of A and the columns of B."""
    if not shared.keys() >= {"vera_A", "vera_B"}:
        raise ValueError("it lacks the projections that all modules share; save it with save_projection=True")
    outer, inner = parts["vera_lambda_b"].double(), parts["vera_lambda_d"].double()

    def add(weight: Tensor) -> Tensor:
        b, a = (shared[name].to(weight) for name in ("vera_B", "vera_A"))
        return weight + (outer.to(weight)[:, None] * b[: len(weight)]) @ (
            inner.to(weight)[:, None] * a[:, : weight.shape[1]]
        )

    yield "weight", Mapped(add, (len(outer), None))


def _hra(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W H_1 ... H_r`, with the reflections `H = 1 - 2 u u^T` at the columns of `hra_u`."""
    columns = parts["hra_u"].double()
    if config.get("apply_GS"):
        columns = torch.linalg.qr(columns).Q

    def reflect(weight: Tensor) -> Tensor:
        for u in (columns / columns.norm(dim=0)).to(weight).T:
            weight = weight - 2 * torch.outer(weight @ u, u)
        return weight

    yield "weight", Mapped(reflect, (None, len(columns)))


def _oft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W R^T` with a rotation in blocks, `R = (1 - Q)(1 + Q)^-1` for antisymmetric Q; of embeddings `W R`."""
    is_embedding = "oft_embedding_R.weight" in parts
    values = parts["oft_embedding_R.weight" if is_embedding else "oft_R.weight"].double()
    size = round((1 + math.sqrt(1 + 8 * values.shape[1])) / 2)
    matrix = values.new_zeros(len(values), size, size)
    matrix[:, *torch.triu_indices(size, size, 1)] = values
    matrix -= matrix.mT.clone()
    if config.get("coft"):
        most = float(config.get("eps", 6e-5)) / math.sqrt(len(values))
        matrix = matrix * (most / torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)
    one = torch.eye(size, dtype=torch.float64)
    if config.get("use_cayley_neumann"):
        terms = int(config.get("num_cayley_neumann_terms", 5))
        if not 1 <= terms <= MOST_TERMS:
            raise ValueError(f"num_cayley_neumann_terms is {terms}, but must be from 1 to {MOST_TERMS}")
        powers = [torch.linalg.matrix_power(matrix, k) for k in range(terms)]
        blocks = powers[0] + 2 * sum(powers[1:-1], torch.zeros_like(matrix)) + powers[-1] * (terms > 1)
    else:
        blocks = torch.linalg.solve(one + matrix, one - matrix, left=False)

    def rotate(weight: Tensor) -> Tensor:
        parted = weight.reshape(len(weight), -1, size)
        rotated: Tensor = torch.einsum("nbi,bij->nbj", parted, blocks.to(weight).expand(parted.shape[1], -1, -1))
        return rotated.reshape(weight.shape)

    blocks = blocks if is_embedding else blocks.mT
    yield "weight", Mapped(rotate, (None, None if config.get("block_share") else size * len(values)))


def _hira(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + W * (B A)`, entry by entry."""
    is_embedding = "hira_embedding_A" in parts
    a, b = (parts[f"hira_{'embedding_' if is_embedding else ''}{factor}"].double() for factor in "AB")
    product = b.reshape(-1, a.shape[0]) @ a.flatten(1)
    product = product.T if is_embedding else product

    def multiply(weight: Tensor) -> Tensor:
        return weight + weight * product.to(weight)

    yield "weight", Mapped(multiply, (product.shape[0], product.shape[1]))


def _shira(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + d` in the entries that the adapter names."""
    rows, columns = parts["shira_indices"].long()

    def add(weight: Tensor) -> Tensor:
        return weight.index_put((rows, columns), parts["shira_weight"].to(weight), accumulate=True)

    yield "weight", Mapped(add, None)


def _norms(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """Weights and biases of norms as they were trained."""
    for name, value in parts.items():
        yield name.removeprefix("ln_tuning_layers."), Replaced(value)


def trained_rows(module: str, delta: Tensor, indices: Any) -> Mapped:
    """The rows of some tokens, as they were trained.

    Raises:
        ValueError: The configuration names no tokens for this module, or another number of them.
    """
    if isinstance(indices, Mapping):
        indices = next((own for key, own in indices.items() if f".{module}".endswith(f".{key}")), None)
    if not isinstance(indices, list) or len(indices) != len(delta):
        raise ValueError(f"it has rows for {len(delta)} tokens of {module!r}, which its configuration does not name")
    places = torch.tensor(indices)

    def put(weight: Tensor) -> Tensor:
        return weight.index_copy(0, places, delta.to(weight))

    return Mapped(put, (None, delta.shape[1]))


def _tokens(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    yield "weight", trained_rows(module, parts["trainable_tokens_delta"], config.get("token_indices"))


def _beft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`b + d`."""
    yield "bias", _added(parts["beft_bias"].flatten()[:, None])


def _c3a(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + d / in`, where every block of d is circulant: its entry (p, q) is that of the kernel at q - p."""
    kernel = parts["c3a_kernel"].double()
    rows, columns, size = kernel.shape
    places = (torch.arange(size) - torch.arange(size)[:, None]) % size
    whole = kernel[..., places].permute(0, 2, 1, 3).reshape(rows * size, columns * size)
    yield "weight", _added(whole / whole.shape[1])


def _delora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = l / rank B diag(1 / (|A_i| |B_i|)) A diag(w)`, with the norms w of the columns of the base's weight."""
    a, b = parts["delora_A"].double(), parts["delora_B"].double()
    norms = a.norm(dim=1).clamp(min=1e-4) * b.norm(dim=0).clamp(min=1e-4)
    scale = parts["delora_lambda"].double() / len(a)
    yield "weight", _added((b * (scale / norms)) @ a * parts["delora_w_norm"].double())


def _fourier(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s Re F^-1(E)`, the inverse Fourier transform of a few entries, whose places a seed draws."""
    spectrum, seed = parts["fourierft_spectrum"].double(), int(config.get("random_loc_seed", 777))
    scale = float(config.get("scaling", 150.0))

    def add(weight: Tensor) -> Tensor:
        places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))[: len(spectrum)]
        entries = torch.zeros(weight.numel(), dtype=torch.float64).index_put((places,), spectrum)
        change: Tensor = torch.fft.ifft2(entries.reshape(weight.shape)).real
        return weight + scale * change.to(weight)

    yield "weight", Mapped(add)


def _miss(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + d`, whose columns repeat those of a block; by the variant "bat" of blocks, `W + W B + B`."""
    block = parts["miss_block"].double()

    def repeat(weight: Tensor) -> Tensor:
        rows = block.repeat(1, len(weight) // block.shape[1]).to(weight)
        return weight + rows[torch.arange(weight.shape[1]) % len(rows)].T

    def multiply(weight: Tensor) -> Tensor:
        size, own = block.shape[-1], block.to(weight)
        parted = weight.reshape(len(weight) // size, size, -1, size)
        made: Tensor = torch.einsum("apbq,aqr->apbr", parted, own) + own[:, :, None]
        return weight + made.reshape(weight.shape)

    yield "weight", Mapped(multiply if config.get("init_weights") == "bat" else repeat)


def _road(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`R W` and `R b`, where R turns the two halves of every group of outputs into one another."""
    theta, alpha = parts["road_theta"].double(), parts["road_alpha"].double()
    half = int(config.get("group_size", 64)) // 2
    if config.get("variant", "road_1") == "road_4":
        one, two = theta.reshape(-1, 2, 2 * half).unbind(1)
        first, second = alpha.reshape(-1, 2, 2 * half).unbind(1)
        cosines, sines = (first * one.cos()).flatten(), (second * two.sin()).flatten()
    else:
        shape = (-1, 1 if config.get("variant", "road_1") == "road_1" else 2, half)
        cosines, sines = (
            (alpha * turned).reshape(shape).expand(-1, 2, -1).flatten() for turned in (theta.cos(), theta.sin())
        )
    cosines, sines = (one.reshape(-1, 2, half, 1) for one in (cosines, sines))

    def turn(weight: Tensor) -> Tensor:
        parted = weight.reshape(-1, 2, half, weight.shape[1])
        across = torch.stack([-parted[:, 1], parted[:, 0]], 1)
        return (cosines.to(weight) * parted + sines.to(weight) * across).reshape(weight.shape)

    yield "weight", Mapped(turn, (cosines.numel(), None))
    yield "bias", Mapped(turn, (cosines.numel(), 1), is_optional=True)


KINDS: Mapping[str, Kind] = {
    "IA3": Kind("ia3_l", _ia3),
    "LOHA": Kind("hada_(w[12]_[ab]|t[12])", _loha),
    "LOKR": Kind("lokr_(w[12](_[ab])?|t2)", _lokr),
    "ADALORA": Kind("lora_[ABE]", _adalora),
    "VERA": Kind("vera_(lambda_[bd]|[AB])", _vera),
    "HRA": Kind("hra_u", _hra),
    "OFT": Kind(r"oft_(embedding_)?R\.weight", _oft),
    "HIRA": Kind("hira_(embedding_)?[AB]", _hira),
    "BEFT": Kind("beft_bias", _beft),
    "C3A": Kind("c3a_kernel", _c3a),
    "DELORA": Kind("delora_(A|B|lambda|w_norm)", _delora),
    "FOURIERFT": Kind("fourierft_spectrum", _fourier),
    "MISS": Kind("miss_block", _miss),
    "ROAD": Kind("road_(theta|alpha)", _road),
    "SHIRA": Kind("shira_(weight|indices)", _shira),
    "LN_TUNING": Kind(r"ln_tuning_layers\.(weight|bias)", _norms),
    "TRAINABLE_TOKENS": Kind("trainable_tokens_delta", _tokens),
}
"""Every kind but LoRA, by its name in configurations."""


def split_modules(kind: Kind, params: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Parts], Parts, set[str]]:
    """The tensors of each module, those that all modules share, and the names of all of these."""
    modules: dict[str, dict[str, Tensor]] = {}
    known: set[str] = set()
    pattern = re.compile(rf"(?P<module>.+)\.(?P<part>{kind.names})(\.default)?")
    for name, tensor in params.items():
        found = pattern.fullmatch(name.removeprefix(prefix))
        if found is not None:
            modules.setdefault(found["module"], {})[found["part"]] = tensor
            known.add(name)
    shared = modules.pop("base_model", {})
    return {**modules}, shared, known
