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
    """Changes of outputs by pruning, relative to the largest entry of each, with all networks in float64.

    Attributes:
        exact: The change by the removals that should leave the function as it is.
        cut: The smaller network against the given one in which nothing reads the removed units; None where a norm over
            the units of a group makes these differ.
        tolerance: The change that rounding allows in both.
        given: The smaller network against the given one, with all of its units, on the first batch: how far pruning
            went.
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
        params: Its tensors, smaller than those of the given network, of the same names and dtypes.
        symmetry: Its symmetry: the same groups with the new sizes.
        kept: For each group that was cut the units of the given network that stayed: `[*bases, kept]`.
        sizes: Units of each group before and after, of all groups that could be cut.
        exact: Units that were removed without a change of the function, each with the reason.
        fixed: Groups that were left as they are, each with the reason.
        module: A copy of the task's module that has the new sizes and values and runs; None without a task.
        certificate: Changes of the outputs; None without a task, because nothing was run then.
        losses: Losses by the task that judges: of the network as it was, without the exact removals, and at the end;
            empty without one.
        data: The names of the data that chose, and of those that judged.
        notes: Sentences about what was done.
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
        """The number of values that are left."""
        tensors = {id(tensor): tensor for tensor in self.params.values()}
        return sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())

    def removed(self, group: str) -> Tensor:
        """Return the units of a group that were removed, of each copy: `[*bases, removed]`."""
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
        """Return sentences about the groups that were left as they are, one for each reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.fixed:
            reasons.setdefault(reason, []).append(name)
        more = {reason: f" and {len(names) - 3} more" if len(names) > 3 else "" for reason, names in reasons.items()}
        return [f"left as they are: {', '.join(names[:3])}{more[why]}: {why}" for why, names in reasons.items()]
