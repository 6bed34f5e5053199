"""Scores of pairs of networks, and how well the scores separate related pairs from other pairs, for
`benchmarks/lineage.py`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lineage_networks import Params
from torch import Tensor, nn
from torch.func import functional_call

Runnable = tuple[nn.Module, Params]
"""A network with the module that runs it."""


def matrices(params: Params) -> dict[str, Tensor]:
    """Return tensors with two or more axes, as matrices."""
    return {n: t.flatten(1) for n, t in params.items() if t.is_floating_point() and t.ndim > 1}


def cosine(a: Params, b: Params) -> float:
    """Return the mean cosine of the stored matrices that have the same shape in both networks."""
    left, right = matrices(a), matrices(b)
    names = [n for n in left if n in right and left[n].shape == right[n].shape]
    values = [torch.cosine_similarity(left[n].flatten(), right[n].flatten(), dim=0) for n in names]
    return float(torch.stack(values).mean())


def spectral_distance(a: Params, b: Params) -> float:
    """Return the mean relative distance of the singular values of all matrices."""
    left, right = matrices(a), matrices(b)
    values = []
    for name in left:
        x, y = (torch.linalg.svdvals(one[name]) for one in (left, right))
        values.append((x - y).norm() / x.norm())
    return float(torch.stack(values).mean())


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers and convolutions."""
    return [one for one in module.modules() if isinstance(one, nn.Linear | nn.Conv2d)]


def cka(
    inputs: Tensor, first: Runnable, second: Runnable, parts: Callable[[nn.Module], list[nn.Module]] = layers_of
) -> float:
    """Return the mean linear centered kernel alignment of the outputs of layers with the same index, for some
    inputs.
    """

    def activations(module: nn.Module, params: Params) -> list[Tensor]:
        seen: list[Tensor] = []
        hooks = [
            one.register_forward_hook(
                lambda _m, _i, out: seen.append((out[0] if isinstance(out, tuple) else out).flatten(1))
            )
            for one in parts(module)
        ]
        with torch.no_grad():
            functional_call(module, params, (inputs,))
        for hook in hooks:
            hook.remove()
        return [x - x.mean(0) for x in seen]

    values = []
    for x, y in zip(activations(*first), activations(*second), strict=False):
        left, right = x @ x.T, y @ y.T
        values.append((left * right).sum() / (left.norm() * right.norm()))
    return float(torch.stack(values).mean())


def area(related: list[float], unrelated: list[float]) -> float:
    """Return the probability that a related pair has the larger score, where ties count half."""
    x, y = torch.tensor(related, dtype=torch.float64), torch.tensor(unrelated, dtype=torch.float64)
    gaps = x.unsqueeze(1) - y
    return float((gaps > 0).double().mean() + (gaps == 0).double().mean() / 2)


def weighted_area(rows: list[dict[str, Any]], unrelated: list[dict[str, Any]], score: str) -> float:
    """Return the mean over architectures of the area under the curve, weighted by the number of related pairs."""
    total = 0.0
    for family, count in Counter(row["family"] for row in rows).items():
        own, strangers = ([row[score] for row in some if row["family"] == family] for some in (rows, unrelated))
        total += count * area(own, strangers)
    return total / len(rows)


def verdicts(rows: list[dict[str, Any]]) -> str:
    """Return the number of times that each verdict was given."""
    return ", ".join(f"{verdict} {n}" for verdict, n in Counter(row["verdict"] for row in rows).most_common())


def span(rows: list[dict[str, Any]], score: str, digits: int) -> str:
    """Return the smallest and the largest measured number."""
    known = [row[score] for row in rows if row[score] is not None]
    return f"{min(known):.{digits}f} to {max(known):.{digits}f}" if known else ""
