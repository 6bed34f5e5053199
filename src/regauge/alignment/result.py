"""The result of an alignment: of one pair of networks, of a batch of pairs, or of many networks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

import torch
from torch import Tensor
from typing_extensions import TypeVar

from regauge.checkpoints.alignments import Alignment
from regauge.core.counted import count
from regauge.core.element import Element, concatenate
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

SHARES = ("moved", "flipped", "turned")
"""The columns of `Result.moves` that contain shares, between zero and one."""


if TYPE_CHECKING:
    from matplotlib.figure import Figure

Moved = TypeVar("Moved")
Number = TypeVar("Number", default=float)
Numbers = TypeVar("Numbers", default=tuple[float, ...])
Flag = TypeVar("Flag", default=bool)


@dataclass(frozen=True, repr=False)
class Result(Generic[Moved, Number, Numbers, Flag]):
    """The result of an alignment.

    | returned by | element | params | objective, initial | history, starts | is_converged |
    | --- | --- | --- | --- | --- | --- |
    | `align` | one element | like the second network | floats | tuples of floats | a bool |
    | `align_pairs`, `Method.match` | a batch | a population | `[pairs]` | `[steps, pairs]` | `[pairs]` |
    | `align_many`, `Method.match_many` | one for each network | a tuple | floats | tuples of floats | a bool |

    For a batch of pairs, numbers are float64 tensors. If a method does not compute a field, the field is empty or None.

    Attributes:
        symmetry: The symmetry to which the elements belong. All sizes of its groups are known.
        element: The element that aligns the second network. For many networks, a batch of elements that map each
            network into the universe. The first element of the batch is the identity, so the first network is
            unchanged.
        params: The aligned networks, `act(element, params_b)`. Each aligned network computes the same function as
            before.
        objective: The method's objective at `element`, which is maximized. For many networks, the objective is a sum
            over pairs.
        initial: The objective of the identity; never above `objective`.
        history: The objective at the start of the best ascent, and after each step. The values in `history` never
            decrease. In a batch, pairs that ended earlier repeat their last objective.
        starts: The objective that each ascent or candidate reached, in the order in which they were tried. In a batch,
            the objective is NaN for an ascent that was not run for a pair.
        is_converged: Whether the method ended because no single step could improve the objective.
        is_judged: Whether a task evaluated the result. Without a task, the height of the loss barrier is unknown.
        notes: Messages about properties of the first network that the second could not adopt, and a message if the
            element changes nothing.
    """

    symmetry: Symmetry
    element: Element
    params: Moved
    objective: Number
    initial: Number
    history: Numbers
    starts: Numbers
    is_converged: Flag | None
    is_judged: bool
    notes: tuple[str, ...] = ()

    save = Alignment.save

    @property
    def elements(self) -> tuple[Element, ...]:
        """The elements of a batch, or of many networks, as a tuple."""
        return tuple(self.element.item(k) for k in range(self.element.batch[0]))

    def pairwise(self, i: int, j: int) -> Element:
        """Return the element that aligns network j to network i, by way of the common coordinates.

        Pairwise elements are consistent: `compose(pairwise(i, j), pairwise(j, k)) == pairwise(i, k)`.
        """
        return self.symmetry.compose(self.symmetry.inverse(self.element.item(i)), self.element.item(j))

    def item(self: "Results", k: int) -> "Result[Params]":
        """Return the result for one pair of a batch."""
        return Result(
            symmetry=self.symmetry,
            element=self.element.item(k),
            params={name: tensor[k] for name, tensor in self.params.items()},
            objective=float(self.objective[k]),
            initial=float(self.initial[k]),
            history=tuple(self.history[:, k].tolist()),
            starts=tuple(value for value in self.starts[:, k].tolist() if value == value),
            is_converged=None if self.is_converged is None else bool(self.is_converged[k]),
            is_judged=self.is_judged,
            notes=self.notes,
        )

    def rows(self: "Results", rows: Tensor) -> "Results":
        """Return the results for the selected pairs of a batch, in the order of the given indices."""
        return replace(
            self,
            element=self.element.rows(rows),
            params={name: tensor[rows.to(tensor.device)] for name, tensor in self.params.items()},
            objective=self.objective[rows],
            initial=self.initial[rows],
            history=self.history[:, rows],
            starts=self.starts[:, rows],
            is_converged=None if self.is_converged is None else self.is_converged[rows],
        )

    def but(self: "Results", rows: Tensor, other: "Results") -> "Results":
        """Return a batch of results in which `other` replaces the results of the pairs in `rows`."""
        if not bool(rows.any()):
            return self
        steps, tries = max(len(self.history), len(other.history)), max(len(self.starts), len(other.starts))
        ends = (self.is_converged, other.is_converged)

        def choose(here: Tensor, there: Tensor) -> Tensor:
            shape = (-1, *[1] * (here.ndim - 1))
            return torch.where(rows.to(here.device).reshape(shape), there, here)

        return replace(
            self,
            element=other.element.where(rows, self.element),
            params={name: choose(tensor, other.params[name]) for name, tensor in self.params.items()},
            objective=choose(self.objective, other.objective),
            initial=choose(self.initial, other.initial),
            history=torch.where(rows, extend(other.history, steps), extend(self.history, steps)),
            starts=torch.where(rows, extend(other.starts, tries, torch.nan), extend(self.starts, tries, torch.nan)),
            is_converged=None if ends[0] is None or ends[1] is None else choose(ends[0], ends[1]),
        )

    @property
    def moves(self) -> tuple[dict[str, Any], ...]:
        """The shares of units and signs that the element changes, with one row for each group on which it can act.

        "moved" is the share of units that the element moves to another position. "flipped" is the share of negative
        signs and odd half periods. "turned" is the Frobenius distance of a matrix from the identity. The Frobenius
        distance is divided by the distance of a random rotation, `sqrt(2 size)`, and clipped to 1. "low" and "high" are
        the 0.05 and 0.95 quantiles of the factors. An entry is None if its quantity does not apply to the group.
        Entries are averaged over copies and over the networks of a batch. "group" and "units" are the name and size of
        the group.
        """
        return tuple(moves_of(self.symmetry, self.element))

    def plot(self) -> "Figure":
        """Plot `moves`: the share of each group that the element changes, in the order of the network, and the scales.

        Raises:
            ValueError: The symmetry has no groups.
        """
        from regauge.report.alignment_figures import moves_figure

        if not self.moves:
            raise ValueError("the symmetry has no groups, so there is nothing to plot; `print(symmetry)` explains why")
        return moves_figure(self.moves)

    @property
    def report(self) -> str:
        """Return sentences about the result, about options to try, and about properties of A that B could not adopt."""
        return "\n".join([self._outcome, *self.notes])

    @property
    def _outcome(self) -> str:
        initial, objective = (torch.as_tensor(value, dtype=torch.float64) for value in (self.initial, self.objective))
        gained = f"objective {float(initial.mean()):.6g} -> {float(objective.mean()):.6g}"
        if objective.ndim:
            gained = f"{count(objective, 'pair')}: mean {gained}"
        elif self.element.batch:
            gained = f"{self.element.batch[0]} networks: {gained}"
        history, starts = (torch.as_tensor(values) for values in (self.history, self.starts))
        if len(history):
            gained += f" in {'at most ' if objective.ndim else ''}{count(history[1:], 'step')}"
        if len(starts) > 1:
            gained += f", best of {'up to ' if objective.ndim else ''}{len(starts)}"
        if self.is_converged is None:
            return gained
        moving = int((~torch.as_tensor(self.is_converged)).sum())
        if moving:
            stopped = f"{moving} were" if objective.ndim else "it was"
            return f"{gained}; {stopped} stopped before convergence: allow the method more sweeps or steps"
        if self.is_judged:
            return f"{gained}; a local optimum: restarts or another method may find a better one"
        return (
            f"{gained}; a local optimum of the method's own objective. `regauge line` and `rg.line` measure the barrier"
        )

    def __repr__(self) -> str:
        return f"Result({count(self.symmetry.groups, 'group')}, {self._outcome})"

    def __str__(self) -> str:
        return self.report


Results: TypeAlias = Result[Params, Tensor, Tensor, Tensor]
"""A batch of results, with one result for each pair."""
ManyResult: TypeAlias = Result[tuple[Params, ...]]
"""The result of aligning many networks in one universe."""


def join(parts: Sequence[Results]) -> Results:
    """Concatenate batches of results from one method along the pair axis."""
    if len(parts) == 1:
        return parts[0]
    ends = [part.is_converged for part in parts if part.is_converged is not None]
    steps, tries = max(len(part.history) for part in parts), max(len(part.starts) for part in parts)
    return replace(
        parts[0],
        element=concatenate([part.element for part in parts]),
        params={name: torch.cat([part.params[name] for part in parts]) for name in parts[0].params},
        objective=torch.cat([part.objective for part in parts]),
        initial=torch.cat([part.initial for part in parts]),
        history=torch.cat([extend(part.history, steps) for part in parts], 1),
        starts=torch.cat([extend(part.starts, tries, torch.nan) for part in parts], 1),
        is_converged=torch.cat(ends) if len(ends) == len(parts) else None,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def extend(rows: Tensor, count: int, value: float | None = None) -> Tensor:
    """Extend a tensor to a number of rows, with copies of a value or, if it is None, of the last row."""
    missing = (count - len(rows), *rows.shape[1:])
    more = rows[-1:].expand(missing) if value is None else rows.new_full(missing, value)
    return torch.cat([rows, more])


def moves_of(symmetry: Symmetry, element: Element) -> Iterator[dict[str, Any]]:
    """Yield the rows of `Result.moves`: one for each group on which an element can act, averaged over a batch."""
    for group in symmetry.groups:
        value = element[group.name]
        row: dict[str, Any] = {"group": group.name, "units": group.size}
        row |= dict.fromkeys((*SHARES, "low", "high"))
        if value.perm is not None and group.has_order:
            row["moved"] = float((value.perm != torch.arange(group.size, device=value.perm.device)).double().mean())
        odd = [] if value.sign is None else [(value.sign < 0).double().flatten()]
        odd += [] if value.shift is None else [(value.shift % 2 != 0).double().flatten()]
        if any(map(len, odd)):
            row["flipped"] = float(torch.cat(odd).mean())
        matrix = value.matrix if value.matrix is not None else element.rotation.get(group.name)
        if matrix is not None:
            far = torch.linalg.matrix_norm(matrix - torch.eye(group.size, dtype=matrix.dtype, device=matrix.device))
            row["turned"] = float((far / math.sqrt(2 * group.size)).clamp(max=1).mean())
        if value.scale is not None and value.scale.numel():
            factors = value.scale.flatten().sort().values
            row["low"], row["high"] = (float(factors[round(share * (len(factors) - 1))]) for share in (0.05, 0.95))
        if any(row[name] is not None for name in (*SHARES, "low")):
            yield row
