"""The result of pruning."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from regauge.core.counted import count
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning.exact import Removal

SHOWN = 12
"""The largest number of groups that a report lists."""


@dataclass(frozen=True)
class PruneCertificate:
    """Changes of outputs by pruning, relative to the largest entry of each output, evaluated in float64.

    Attributes:
        exact: The change that the exact removals cause, which should be zero up to rounding.
        cut: The change between the smaller network and the given network in which no layer reads the removed units.
            None if a network computes a norm over the units of a cut group, because the smaller network then differs
            from the given network.
        tolerance: The largest `exact` and `cut` that count as rounding.
        given: The change between the given network with all units and the smaller network, on the first batch.
    """

    exact: float
    cut: float | None
    tolerance: float
    given: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether `exact` and `cut` are within the tolerance."""
        return self.exact <= self.tolerance and (self.cut is None or self.cut <= self.tolerance)

    def __str__(self) -> str:
        cut = (
            "a norm reads units that were removed, so the smaller network is not the given network without them"
            if self.cut is None
            else f"without the removed units, the given network differs from the smaller one by {self.cut:.1e}"
        )
        far = f"outputs differ from those of the given network by {self.given:.2g} of their largest entry"
        verdict = "" if self.ok else "NOT correct: "
        exact = f"exact removals change outputs by {self.exact:.1e} in float64 (tolerance {self.tolerance:.0e})"
        return f"{verdict}{far}; {exact}; {cut}"


@dataclass(frozen=True, repr=False)
class Pruned:
    """A pruned network, with its module, its removed units and a certificate.

    Attributes:
        params: The tensors of the pruned network, with the names and dtypes of the given network.
        symmetry: The symmetry of the pruned network, which has the same groups with the new sizes.
        kept: For each cut group, the indices of the kept units in the given network: `[*bases, kept]`.
        sizes: For each group that could be cut, the numbers of units before and after pruning.
        exact: Units that were removed without changing the function, each with the reason.
        fixed: Groups that were not cut, each with the reason.
        module: A copy of the task's module with the new sizes and parameters; None without a task.
        certificate: Changes of the outputs; None without a task, because the network was not evaluated.
        losses: Metrics on the held-out task: of the given network ("as it was"), of the network after the exact
            removals ("exact removals"), and of the result ("at the end"). Empty without a task.
        data: The name of the data that determined the removed units, and the name of the data on which losses are
            measured.
        notes: Messages about the pruning.
    """

    params: Params
    symmetry: Symmetry
    kept: Mapping[str, Tensor]
    sizes: Mapping[str, tuple[int, int]]
    exact: tuple[Removal, ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()
    module: nn.Module | None = None
    certificate: PruneCertificate | None = None
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    data: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> int:
        """The number of remaining parameters."""
        tensors = {id(tensor): tensor for tensor in self.params.values()}
        return sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())

    def removed(self, group: str) -> Tensor:
        """Return the removed units of each copy of a group: `[*bases, removed]`."""
        kept, (size, left) = self.kept[group], self.sizes[group]
        mask = torch.ones(*kept.shape[:-1], size, dtype=torch.int64).scatter(-1, kept, 0)
        return mask.argsort(dim=-1, descending=True, stable=True)[..., : size - left]

    def __repr__(self) -> str:
        cut = [f"{name} {old} -> {new}" for name, (old, new) in self.sizes.items() if new < old]
        more = f" and {len(cut) - 3} more" if len(cut) > 3 else ""
        return f"Pruned({', '.join(cut[:3]) or 'nothing removed'}{more}; {self.values:,} values)"

    def __str__(self) -> str:
        rows = [f"{name}: {old} -> {new}" for name, (old, new) in self.sizes.items() if new < old]
        lines = [f"{count(rows, 'group')} cut, {self.values:,} values left", *rows[:SHOWN]]
        lines += [f"and {len(rows) - SHOWN} more groups"] if len(rows) > SHOWN else []
        by_reason: dict[str, int] = {}
        for one in self.exact:
            by_reason[one.why] = by_reason.get(one.why, 0) + 1
        listed = ", ".join(f"{number} {why}" for why, number in by_reason.items())
        lines += [f"removed without changing the function: {listed}"] if listed else []
        lines += [str(self.certificate)] if self.certificate is not None else []
        for when, metrics in self.losses.items():
            lines.append(f"{when}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        return "\n".join([*lines, *self.describe_fixed(), *self.notes])

    def describe_fixed(self) -> list[str]:
        """Return messages about the groups that were not cut, one message for each reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.fixed:
            reasons.setdefault(reason, []).append(name)
        more = {reason: f" and {len(names) - 3} more" if len(names) > 3 else "" for reason, names in reasons.items()}
        return [f"not pruned: {', '.join(names[:3])}{more[why]}: {why}" for why, names in reasons.items()]
