"""Linear maps between the activations of two networks, which transfer weight changes between the networks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.outputs import evaluating
from regauge.core.symmetry import Symmetry
from regauge.core.task import call
from regauge.merging.carried_change import CarriedChange

RIDGE = 3e-1
"""The ridge penalty of a map, as a share of the mean variance of the map's inputs."""
SAMPLES = 8192
"""The largest number of samples (activations at a position) that are used per layer and batch."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DENSE = (nn.Linear, nn.Embedding, *CONVOLUTIONS)

Seen = dict[str, tuple[Tensor, Tensor]]
"""Inputs and outputs of layers by name, `[samples, units]`."""
Map = tuple[Tensor, Tensor]
"""A matrix `[units out, units in]` and an offset `[units out]`, in float64."""


@dataclass
class _Moments:
    """Sums over samples of two vectors and of their products, from which ridge regression between the vectors is
    computed.
    """

    sums: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples of both vectors, `[samples, units]` each, to the sums."""
        one = x.new_tensor(float(len(x)))
        own = [one, x.sum(0), y.sum(0), x.mT @ x, x.mT @ y, y.mT @ y]
        self.sums = [a + b for a, b in zip(self.sums, own, strict=True)] if self.sums else own

    def map(self, *, is_inverse: bool = False, is_shared: bool = False) -> Map:
        """Return the map M and the offset for `y = M x + offset`, or the map from y to x."""
        count, x, y, square, both, other = self.sums
        if is_inverse:
            x, y, square, both = y, x, other, both.mT
        if is_shared and len(x) == len(y):
            return torch.eye(len(x), dtype=x.dtype), torch.zeros_like(x)
        square, both = square - x.outer(x) / count, both - x.outer(y) / count
        square.diagonal().add_(RIDGE * square.diagonal().mean() + torch.finfo(torch.float64).tiny)
        matrix = torch.linalg.solve(square, both).mT
        return matrix, (y - matrix @ x) / count


def carry_by_maps(
    networks: tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]],
    modules: tuple[nn.Module, nn.Module],
    inputs: Iterable[Any],
    symmetry: Symmetry,
) -> tuple[CarriedChange, tuple[str, ...]]:
    """Transfer the weight change of a fine-tune to another base by ridge regression between activations.

    The change is transferred layer by layer. A layer computes `W x + b`. Ridge regression fits two maps: `y_b = L y_a`
    for changes of outputs, and `x_a = R x_b + d` for inputs. The weight change dW of the layer becomes `L dW R`, and
    the bias change db becomes `L (db + dW d)`. Axes on which no group acts, such as pixels and class labels, are the
    same in both networks. For an elementwise gain, only the diagonal of `L diag(dw) R` is used. Let `S` map the input
    of a normalization layer. Running means change by `S dm`, and running variances by `S^2 dv`, where the square is
    entrywise.

    Args:
        networks: The first base, the fine-tune of the first base, and the second base.
        modules: The model of the first base, and the model of the second base.
        inputs: Batches without targets.
        symmetry: The symmetry of the second base.

    Returns:
        The change in the coordinates of the second base, and the changed parameters for which no map exists.
    """
    base, tuned, other = networks
    read, made = dict[str, _Moments](), dict[str, _Moments]()
    for batch in inputs:
        first, second = (_run(module, one, batch) for module, one in zip(modules, (base, other), strict=True))
        for name in first.keys() & second.keys():
            (x_a, y_a), (x_b, y_b) = first[name], second[name]
            read.setdefault(name, _Moments()).add(x_a, x_b)
            made.setdefault(name, _Moments()).add(y_a, y_b)
    kinds = dict(modules[1].named_modules())
    found = CarriedChange({})
    for name, moments in made.items():
        lead = f"{name}." if name else ""
        kind, weight = kinds[name], f"{lead}weight"
        delta = tuned[weight].double() - base[weight].double()
        # Embeddings, and the layers of GPT-2, store W^T.
        is_turned = isinstance(kind, nn.Embedding) or type(kind).__name__ == "Conv1D"
        delta = delta.T if is_turned else delta
        moved = {site.placement.axis for site in symmetry.sites.get(weight, ())}
        out = moments.map(is_shared=int(is_turned) not in moved)[0]
        if isinstance(kind, nn.Embedding):
            found.change[weight] = (out @ delta).T
            continue
        is_shared = delta.ndim > 1 and int(not is_turned) not in moved
        into, offset = read[name].map(is_inverse=True, is_shared=is_shared)
        if delta.ndim == 1:
            found.change[weight] = torch.einsum("pi,i,ip->p", out, delta, into)
            drift = delta * offset
        else:
            carried = torch.einsum("po,oi...,iq->pq...", out, delta, into)
            found.change[weight] = carried.T if is_turned else carried
            drift = delta.flatten(2).sum(-1) @ offset if delta.ndim > 2 else delta @ offset
        bias = f"{lead}bias"
        if bias in base and bias in other:
            found.change[bias] = out @ (tuned[bias].double() - base[bias].double() + drift)
        _carry_statistics(found, lead, read[name].map()[0], base, tuned)
    for names in symmetry.tied:
        own = [found.change[name] for name in names if name in found.change]
        if own:
            found.change.update(
                dict.fromkeys((name for name in names if name in other), sum(own[1:], own[0]) / len(own))
            )
    changed = (n for n, t in base.items() if t.is_floating_point() and not torch.equal(t, tuned[n]))
    return found, tuple(n for n in changed if n not in found.change and n not in symmetry.structure)


def _carry_statistics(
    found: CarriedChange, lead: str, matrix: Tensor, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]
) -> None:
    """Add the changes of a layer's running statistics, if there are any; `matrix` maps inputs of the layer."""
    mean, variance = f"{lead}running_mean", f"{lead}running_var"
    if mean in base and variance in base:
        before, after = base[variance].double(), tuned[variance].double()
        found.change[mean] = matrix @ (tuned[mean].double() - base[mean].double())
        found.change[variance] = matrix.square() @ (after - before)
        found.shrunk[variance] = (after / before).nan_to_num(1.0).clamp(0, 1).min()


def _run(module: nn.Module, params: Mapping[str, Tensor], batch: Any) -> Seen:
    """Return the inputs and outputs of the layers of a module, in float64."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    hooks = []
    for name, kind in module.named_modules():
        if not _is_layer(kind):
            continue

        def keep(kind: nn.Module, given: tuple[Any, ...], made: Any, name: str = name) -> None:
            pair = (made, made) if isinstance(kind, nn.Embedding) else (given[0], made)
            rows = _rows(pair[0], kind), _rows(pair[1], kind)
            weight: Any = kind.weight
            # A vector whose length differs from the number of units has no map.
            if weight.ndim > 1 or all(one.shape[1] == len(weight) for one in rows):
                seen.setdefault(name, []).append(rows)

        hooks.append(kind.register_forward_hook(keep))
    try:
        with torch.no_grad(), evaluating(module):
            call(module, params, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (torch.cat([x for x, _ in own]), torch.cat([y for _, y in own])) for name, own in seen.items()}


def _is_layer(kind: nn.Module) -> bool:
    """Return whether a module is a linear layer, a convolution without groups, or an elementwise affine layer."""
    weight = getattr(kind, "weight", None)
    if not isinstance(weight, Tensor) or getattr(kind, "groups", 1) != 1 or isinstance(kind, nn.PReLU):
        return False
    return isinstance(kind, DENSE) or type(kind).__name__ == "Conv1D" or (weight.ndim == 1 and not [*kind.children()])


def _rows(value: Tensor, kind: nn.Module) -> Tensor:
    """Return an activation as `[samples, units]`, reduced to an evenly spaced subset of the samples."""
    has_places = isinstance(kind, (*CONVOLUTIONS, nn.GroupNorm)) or hasattr(kind, "running_mean")
    rows = (value.movedim(1, -1) if has_places else value).flatten(0, -2).double()
    return rows[:: -(-len(rows) // SAMPLES)]
