"""The outcome of pruning."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from regauge.core.counted import count
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning.exact import Removal

SHOWN = 12
"""Groups that a report names."""


@dataclass(frozen=True)
class PruneCertificate:
    """Changes of outputs by pruning, relative to the largest entry of each output, with all networks in float64.

    Attributes:
        exact: The change by the removals that should not change the function.
        cut: The change from the given network, in which no layer reads the removed units, to the smaller network. None
            if a norm over the units of a group makes the two networks differ.
        tolerance: The largest allowed value of `exact` and `cut`, because of rounding.
        given: The change from the given network with all units to the smaller network, on the first batch.
    """

    exact: float
    cut: float | None
    tolerance: float
    given: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether both changes are within the tolerance."""
        return self.exact <= self.tolerance and (self.cut is None or self.cut <= self.tolerance)

    def __str__(self) -> str:
        cut = (
            "a norm over cut units: the smaller network is not the given one without them"
            if self.cut is None
            else f"with the removed units unread, the given network differs from the smaller one by {self.cut:.1e}"
        )
        far = f"outputs differ from those of the given network by {self.given:.2g} of their largest entry"
        verdict = "" if self.ok else "NOT as it should be: "
        exact = f"exact removals change outputs by {self.exact:.1e} in float64 (tolerance {self.tolerance:.0e})"
        return f"{verdict}{far}; {exact}; {cut}"


@dataclass(frozen=True, repr=False)
class Pruned:
    """A network without some of its units.

    Attributes:
        params: Its tensors, with the names and dtypes of the given network.
        symmetry: Its symmetry, which has the same groups with the new sizes.
        kept: For each group that was cut, the kept units of the given network: `[*bases, kept]`.
        sizes: Numbers of units, before and after, of each group that could be cut.
        exact: Units that were removed without a change of the function, each with the reason.
        fixed: Groups that were not cut, each with the reason.
        module: A copy of the task's module that has the new sizes and values and runs; None without a task.
        certificate: Changes of the outputs; None without a task, because nothing was run then.
        losses: Metrics on the held-out task of the given network ("as it was"), of the network after the exact removals
            ("exact removals"), and of the result ("at the end"). Empty without a task.
        data: The names of the data that chose the units, and of the data on which losses are measured.
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
        """The number of remaining values."""
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
        lines += [f"without a change of the function: {listed}"] if listed else []
        lines += [str(self.certificate)] if self.certificate is not None else []
        for when, metrics in self.losses.items():
            lines.append(f"{when}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        return "\n".join([*lines, *self.describe_fixed(), *self.notes])

    def describe_fixed(self) -> list[str]:
        """Return messages about the groups that were not cut, one for each reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.fixed:
            reasons.setdefault(reason, []).append(name)
        more = {reason: f" and {len(names) - 3} more" if len(names) > 3 else "" for reason, names in reasons.items()}
        return [f"left as they are: {', '.join(names[:3])}{more[why]}: {why}" for why, names in reasons.items()]
