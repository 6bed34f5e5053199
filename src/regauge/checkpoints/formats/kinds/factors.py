"""Kinds of adapters whose change is computed from products of small matrices.

A matrix of the base has the shape `[out, in]`, and a matrix of a convolution `[out, in/groups * kernel]`. `d` is the
change, and `s` is `alpha / rank`.

References:
    Hyeon-Woo et al. (2022), FedPara, whose Hadamard product LoHa takes; Yeh et al. (2024), LyCORIS, section 3 (LoHa and
    LoKr); Zhang et al. (2023), AdaLoRA, equation 3; Kopiczko et al. (2024), VeRA, equation 2; Fillioux et al. (2025),
    PVeRA; Huang et al. (2025), HiRA, equation 2; Bini et al. (2025), DeLoRA, section 3; Jung et al. (2025), GraLoRA; Li
    et al. (2024), VB-LoRA; Albert et al. (2025), RandLoRA; Morris et al. (2026), TinyLoRA; Li et al. (2025), Uni-LoRA;
    Chavan et al. (2023), GLoRA.
"""

import torch
from torch import Tensor

from regauge.checkpoints.formats.changes import CarriedBias, Mapped
from regauge.checkpoints.formats.kinds.kind import NO_PROJECTION, Config, Made, Parts, added, ending, exact, scale


def _core(t: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the kernel of a convolution from a core tensor and the factors of the output and input axes."""
    return torch.einsum("ijkl,ip,jr->prkl", t, a, b)


def loha(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s (A B) * (C D)`, where `*` multiplies entry by entry."""
    p = exact(parts)
    pairs = []
    for k in "12":
        a, b = p[f"hada_w{k}_a"], p[f"hada_w{k}_b"]
        pairs.append(_core(p[f"hada_t{k}"], a, b) if f"hada_t{k}" in p else a @ b)
    yield "weight", added(scale(config, module, parts["hada_w1_b"].shape[0]) * pairs[0] * pairs[1])


def lokr(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s A (x) B`, a Kronecker product; for one-dimensional kernels over the last two axes, as in peft."""
    p = {name.removeprefix("lokr_"): one.double() for name, one in parts.items()}
    first = p["w1"] if "w1" in p else p["w1_a"] @ p["w1_b"]
    if "w2_a" in p:
        p["w2"] = _core(p["t2"], p["w2_a"], p["w2_b"]) if "t2" in p else p["w2_a"] @ p["w2_b"]
    second = p["w2"]
    patterns = config.get("rank_pattern") or {}
    rank = next((one for key, one in patterns.items() if ending(key).fullmatch(module)), config.get("r", 8))
    first = first[..., None, None] if second.ndim == 4 else first
    yield "weight", added(scale(config, module, rank) * torch.kron(first, second.contiguous()))


def adalora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = alpha / rank P diag(l) Q`."""
    p = exact(parts)
    rank = len(p["lora_E"]) + 1e-5  # peft adds this
    yield "weight", added(p["lora_B"] @ (p["lora_E"] * p["lora_A"]) * (float(config.get("lora_alpha", 8)) / rank))


def vera(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """The change is `diag(b) B diag(d) A`, with stored vectors b and d. All modules share the rows of A and the columns
    of B.
    """
    if not shared.keys() >= {"vera_A", "vera_B"}:
        raise ValueError(NO_PROJECTION)
    outer, inner = parts["vera_lambda_b"].double(), parts["vera_lambda_d"].double()

    def add(weight: Tensor) -> Tensor:
        b, a = (shared[name].to(weight) for name in ("vera_B", "vera_A"))
        return weight + (outer.to(weight)[:, None] * b[: len(weight)]) @ (
            inner.to(weight)[:, None] * a[:, : weight.shape[1]]
        )

    yield "weight", Mapped(add, (len(outer), None))


def pvera(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """VeRA with a random vector d. The change uses the mean of d, which belongs to the first half of the stored `d` and
    to the first half of the rows of A.
    """
    if not shared.keys() >= {"pvera_A", "pvera_B"}:
        raise ValueError(NO_PROJECTION)
    half = len(parts["pvera_lambda_d"]) // 2
    means = {"vera_lambda_b": parts["pvera_lambda_b"], "vera_lambda_d": parts["pvera_lambda_d"][:half]}
    yield from vera(module, means, config, {"vera_A": shared["pvera_A"][:half], "vera_B": shared["pvera_B"]})


def hira(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + W * (B A)`, where `*` multiplies entry by entry."""
    is_embedding = "hira_embedding_A" in parts
    a, b = (parts[f"hira_{'embedding_' if is_embedding else ''}{factor}"].double() for factor in "AB")
    product = b.reshape(-1, a.shape[0]) @ a.flatten(1)
    product = product.T if is_embedding else product

    def multiply(weight: Tensor) -> Tensor:
        return weight + weight * product.to(weight)

    yield "weight", Mapped(multiply, (product.shape[0], product.shape[1]))


def delora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = l / rank B diag(1 / (|A_i| |B_i|)) A diag(w)`, where w are the norms of the columns of the base's weight."""
    a, b = parts["delora_A"].double(), parts["delora_B"].double()
    norms = a.norm(dim=1).clamp(min=1e-4) * b.norm(dim=0).clamp(min=1e-4)
    scale = parts["delora_lambda"].double() / len(a)
    yield "weight", added((b * (scale / norms)) @ a * parts["delora_w_norm"].double())


def gralora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s D`, where block (q, p) of D is `B_qp A_pq`: slice p of block q of B times slice q of block p of A."""
    a, b = parts["gralora_A"].double(), parts["gralora_B"].double()
    count, rank = len(a), a.shape[2]
    # A is [block of inputs, input, block of outputs, rank], B is [block of outputs, block of inputs, rank, output].
    own, other = a.reshape(count, -1, count, rank // count), b.reshape(count, count, rank // count, -1)
    change = torch.einsum("piqr,qpro->qopi", own, other).reshape(count * b.shape[2], -1)
    if "gralora_A_general.weight" in parts:
        low, high = parts["gralora_A_general.weight"].double(), parts["gralora_B_general.weight"].double()
        change, rank = change + high @ low, rank + len(low)
    yield "weight", added(float(config.get("alpha", 64)) / rank * change)


def vblora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = B A`. Chunks of A and B are softmax-weighted means of the bank vectors with the largest logits."""
    bank, count = shared["vblora_vector_bank"].double(), int(config.get("topk", 2))

    def mix(logits: Tensor) -> Tensor:
        largest, places = logits.double().topk(count)
        mixed: Tensor = (largest.softmax(-1)[..., None] * bank[places]).sum(-2)
        return mixed

    a, b = mix(parts["vblora_logits_A"]).flatten(1), mix(parts["vblora_logits_B"]).mT
    yield "weight", added(b.reshape(-1, b.shape[2]) @ a)


def randlora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s sum B_k diag(l_k) A_k diag(g_k)`, where A has the length of W's shorter axis. All modules share A and
    B.
    """
    if not shared.keys() >= {"randlora_A", "randlora_B"}:
        raise ValueError(NO_PROJECTION)
    inner, outer = parts["randlora_lambda"].double(), parts["randlora_gamma"].double()
    rank, (count, short) = len(inner), outer.shape
    scale = float(config.get("randlora_alpha", 640)) / rank

    def add(weight: Tensor) -> Tensor:
        a = shared["randlora_A"][:, :count, :short].to(weight) * inner.to(weight)[..., None] * outer.to(weight)
        b = shared["randlora_B"][: max(weight.shape), :count].to(weight)
        change = b.flatten(1) @ a.transpose(0, 1).reshape(count, rank, short).flatten(0, 1)
        return weight + scale * (change if weight.shape[1] == short else change.T)

    yield "weight", Mapped(add)


def tinylora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = B R A`, where R is a sum of random matrices P, weighted by the entries of a vector v.

    A and B are the singular vectors of the base's largest singular values. The index of a module selects the vector v,
    but the file does not store this index. The function therefore finds the index: it samples P with the seed of each
    index until the result equals the stored P.
    """
    if "tinylora_P" not in parts:
        raise ValueError(NO_PROJECTION)
    places, vectors = parts["tinylora_P"], sum(name.startswith("tinylora_v.") for name in shared)
    number = 0
    if vectors > 1:
        if config.get("weight_tying"):
            raise ValueError("some of its modules share a vector (weight_tying), but it does not say which do")
        seed, spread = int(config.get("projection_seed", 42)), places.shape[1] ** -0.5
        drawn = (
            torch.normal(0.0, spread, places.shape, generator=torch.Generator().manual_seed(seed + k))
            for k in range(vectors)
        )
        number = next((k for k, one in enumerate(drawn) if torch.allclose(one, places.float())), -1)
        if number < 0:
            raise ValueError(f"its projection_seed {seed} does not give the projections that it stores")
    mixed = torch.einsum("i,ijk->jk", shared[f"tinylora_v.{number}"].double(), places.double())
    yield "weight", added(parts["tinylora_B"].double() @ mixed @ parts["tinylora_A"].double())


def unilora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = B A`. An index selects each entry of A and B from one shared vector, and a factor multiplies it."""
    if "unilora_indices_A" not in parts:
        raise ValueError("it does not say which values its modules take; save it with save_indices=True")
    values = shared["unilora_theta_d"].double()
    a, b = (values[parts[f"unilora_indices_{k}"].long()] * parts[f"unilora_scales_{k}"].double() for k in "AB")
    yield "weight", added(b @ a)


def glora(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + W * A + B` and `b + b * D + E + W C`. Each of A to E is a product of two factors, a vector or a scalar."""
    p = exact(parts)

    def path(letter: str) -> Tensor | None:
        if f"glora_{letter}.Xd" in p:
            return p[f"glora_{letter}.Xd"] @ p[f"glora_{letter}.Xu"]
        return p.get(f"glora_{letter}.X")

    a, b, c, d, e = map(path, "ABCDE")

    def scale_and_add(weight: Tensor) -> Tensor:
        scaled = weight if a is None else weight + weight * a.to(weight)
        return scaled if b is None else scaled + b.to(weight)

    def carry(bias: Tensor, weight: Tensor) -> Tensor:
        found = bias if d is None else bias + bias * d.to(bias)
        found = found if e is None else found + e.to(bias)
        return found if c is None else found + weight.to(bias) @ c.to(bias).flatten()

    yield "weight", Mapped(scale_and_add)
    if not (c is None and d is None and e is None):
        yield "bias", CarriedBias(carry)
