"""Kinds of adapters whose change depends on the base's matrix, for example on its singular vectors.

References:
    Wang et al. (2025), KaSA; Kumar et al. (2025), DEFT; Chen et al. (2025), PaRa; Nayak et al. (2025), OSF; Zhong et
    al. (2024), PEANuT; Wu et al. (2025), PSOFT; "FRoD: full-rank efficient fine-tuning with rotational degrees" (2026).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from regauge.checkpoints.formats.changes import Mapped
from regauge.checkpoints.formats.kinds.kind import (
    NO_PROJECTION,
    Config,
    Made,
    Parts,
    antisymmetric,
    exact,
    require_terms,
)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "linear": torch.clone,
}  # fmt: skip


def without_smallest(count: int) -> Mapped:
    """Return the change that removes the smallest singular values of a matrix; KaSA applies this change to the base."""

    def cut(weight: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
        kept: Tensor = (u[:, :-count] * s[:-count]) @ v[:-count]
        return kept.to(weight)

    return Mapped(cut)


def deft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + P (s R - Q^T W)` with `Q = relu(P)`. For "qr", an orthogonal basis replaces P and Q. PaRa has no R."""
    p, rank = parts["deft_P"].double(), parts["deft_P"].shape[1]
    by_basis = config.get("decomposition_method", "relu") == "qr"
    left = torch.linalg.qr(p).Q if by_basis else p
    right = left if by_basis else p.relu()
    scale = float(config["alpha"]) / rank if config.get("alpha") else 1.0

    def replace(weight: Tensor) -> Tensor:
        kept = right.T.to(weight) @ weight
        added = scale * parts["deft_R"].to(weight) if "deft_R" in parts else torch.zeros_like(kept)
        return weight + left.to(weight) @ (added - kept)

    yield "weight", Mapped(replace, (len(p), None))


def osf(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """The matrix `W`, in which singular values and vectors of the adapter replace those of the smallest singular
    values.
    """
    u, s, v = (parts[f"osf_svd_params.{one}_low"].double() for one in "USV")

    def replace(weight: Tensor) -> Tensor:
        whole = torch.linalg.svd(weight.double(), full_matrices=False)
        kept = len(whole.S) - len(s)
        found: Tensor = (whole.U[:, :kept] * whole.S[:kept]) @ whole.Vh[:kept] + (u * s) @ v
        return found.to(weight)

    yield "weight", Mapped(replace, (len(u), v.shape[1]))


def peanut(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + s d`, where a small network with the activation `f` computes d from the columns of W."""
    activation, p = str(config.get("act_fn", "relu")), exact(parts)
    if activation not in ACTIVATIONS:
        raise ValueError(f"its activation {activation!r} is none of {', '.join(ACTIVATIONS)}; merge it with peft")
    depth, scale, f = int(config.get("depth", 0)), float(config.get("scaling", 1.0)), ACTIVATIONS[activation]

    def add(weight: Tensor) -> Tensor:
        found, kept = f(weight.T.double() @ p["peanut_A.weight"].T), []
        for k in range(depth):
            kept.append(found)
            found = f(found @ p[f"peanut_encoders.{k}.weight"].T)
        for k in range(depth):
            found = f(found @ p[f"peanut_decoders.{k}.weight"].T) + kept.pop()
        return weight + scale * (found @ p["peanut_B.weight"].T).T.to(weight)

    yield "weight", Mapped(add, (p["peanut_A.weight"].shape[1], None))


def psoft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + U S (R - 1) V` for the largest singular values S, where R is a rotation scaled on both sides.

    The decomposition is computed in float32, as in training, because the signs of singular vectors depend on the
    precision.
    """
    p = {name.removeprefix("psoft_R."): one.double() for name, one in parts.items()}
    rank = int(config.get("r", 32))
    turn = _psoft_turn(p["weight"], rank, config)
    turn = p.get("vector_b", torch.ones(rank).double())[:, None] * turn * p.get("vector_a", torch.ones(rank).double())
    is_split = config.get("ab_svd_init", "psoft_init") == "pissa_init"

    def add(weight: Tensor) -> Tensor:
        if config.get("psoft_svd", "full") == "full":
            u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(config.get("random_seed") or 0))
                u, s, v = torch.svd_lowrank(weight.float(), rank, int(config.get("psoft_svd_lowrank_niter", 10)))
            v = v.T
        u, s, v = u[:, :rank].double(), s[:rank].double(), v[:rank].double()
        inner, outer = (s.sqrt(), s.sqrt()) if is_split else (s, torch.ones_like(s))
        change: Tensor = (u * inner) @ (turn - torch.eye(rank).double()) @ (outer[:, None] * v)
        return weight + change.to(weight)

    yield "weight", Mapped(add)


def _psoft_turn(values: Tensor, rank: int, config: Config) -> Tensor:
    """Return the rotation `(1 + Q)(1 - Q)^-1` for antisymmetric Q, a truncated series of it, or the stored matrix."""
    if not config.get("psoft_orth", True):
        return values
    one, matrix = torch.eye(rank, dtype=torch.float64), antisymmetric(values, rank)
    if not config.get("use_cayley_neumann"):
        turn: Tensor = torch.linalg.solve(one - matrix, one + matrix, left=False)
        return turn
    if config.get("cayley_neumann_eps") is not None:
        most = float(config["cayley_neumann_eps"])
        matrix = matrix * min(1.0, most / max(float(matrix.norm()), 1e-12))
    terms = require_terms(config)
    if terms < 3:
        return one + 2 * matrix * (terms - 1)
    powers = [torch.linalg.matrix_power(matrix, k) for k in range(max(terms, 4))]  # peft uses at least four terms
    series: Tensor = powers[0] + 2 * torch.stack(powers[1:-1]).sum(0) + powers[-1]
    return series


def frod(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """Replace `W = U diag(l_0) V^T` by `U (S + diag(l)) V^T`, where S is sparse. Modules with the same role share V."""
    role = _role(module)
    if f"frod_V.{role}" not in shared:
        raise ValueError(NO_PROJECTION)
    v, places = shared[f"frod_V.{role}"].double(), shared[f"frod_s_indices.{role}"].long()
    inner = torch.diag(parts["frod_lambda_l"].double())
    inner.index_put_((*places,), parts["frod_lambda_s_values"].double(), accumulate=True)

    def replace(weight: Tensor) -> Tensor:
        columns, failed = torch.linalg.solve_ex(v, weight.T.double())
        if failed:
            columns = torch.linalg.pinv(v, rtol=1e-6) @ weight.T.double()
        norms = columns.norm(dim=1, keepdim=True)
        u = torch.where(norms > 1e-12, columns / norms.clamp(min=1e-300), 0.0).T
        return (u @ inner @ v.T).to(weight)

    yield "weight", Mapped(replace, (None, len(v)))


def _role(module: str) -> str:
    """Return the role of a module, for example "q_proj". Modules with the same role share a matrix V.

    The role is the last component of the module's path. If the component before the last is not a number, the role is
    the last two components.
    """
    *before, last = module.split(".")
    if not before or before[-1].isdigit():
        return last
    return "attention_output" if [*before[-2:], last] == ["attention", "output", "dense"] else f"{before[-1]}_{last}"
