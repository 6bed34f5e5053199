"""Learned matching: a net reads two networks and predicts which units correspond."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.alignment.engine.climbs import portions
from regauge.alignment.engine.frames import Scales, match_frames
from regauge.alignment.engine.mixing import match_mixture
from regauge.alignment.method import Candidates, Method, Start
from regauge.alignment.methods.continuous_descent import ContinuousDescent
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem
from regauge.alignment.result import ManyResult, Results, join
from regauge.checkpoints.described import DAMAGE, damage
from regauge.core.arguments import check_arguments
from regauge.core.params import are_copies, select
from regauge.core.scales import kept_scales
from regauge.core.symmetry import Symmetry
from regauge.core.typed_json import require_fields
from regauge.learn.course import Trained
from regauge.learn.populations import to_net
from regauge.learn.unit_vectors import Placed, length_of, place, read_vectors, responses
from regauge.weightspace.heads.unit_features import UnitFeatures
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.net_files import load_net

KIND = "matching"
TIES = 1e-4
"""The share of the weights in the objective if only vectors determine the matching. The small share of the weights
breaks ties, and determines shifts.
"""
COMPLETING = 3
"""The largest number of sweeps for the parts of an element that vectors do not determine, such as shifts."""
MATCHED_AT_ONCE = 64
"""The number of networks that the net reads at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class LearnedMatching(Method):
    """A method that matches units with similar vectors, which a trained net computes.

        matcher = learn.load_matching("matcher.safetensors")
        rg.align(params_a, params_b, symmetry, method=matcher)

    The net computes a vector for every unit of both networks. The method maximizes

        share * <vectors> / reach + (1 - share) * <a, g b> / sum |a| |b|

    The first term is the sum of the cosines between the vectors of matched units, divided by its largest possible
    value. The second term is the objective of `WeightMatching`, divided by its largest possible value. Units are
    matched by their vectors first, with exact assignments. Signs and half periods of sines that change the vectors are
    chosen together with the matching. Units that are repeated within heads or other groups are matched within their
    head or group. Next, `sweeps` sweeps of exact coordinate ascent on the objective follow. Rotations, and all other
    parts of the element that vectors do not determine, are computed from the parameters in closed form. Scales are
    treated as in `WeightMatching`.

    If a task is given, four results are compared by the loss halfway between the networks: with sweeps, with vectors
    alone, with `WeightMatching`, and the identity. If scales of the symmetry leave the running statistics of batch
    normalization unchanged, `ContinuousDescent` afterwards lowers the midpoint loss over the scales. The descent starts
    once from the best result and once from `WeightMatching`. The result with the smallest loss is returned, and the
    objective is the negative of this loss. If `share` is 0, the method does not use the net. `fit_matching` returns a
    matcher with share 0 unless the net is clearly better on held-out pairs.

    The vectors of a network depend only on this network, so each network is read once. The net works for any number of
    units, so it also matches networks with other widths than the training networks.

    Attributes:
        net: A net with any layers and with the head `UnitFeatures`, which returns a vector per unit; see
            `fit_matching`.
        share: The share of the vectors in the objective of the sweeps, from 0 to below 1. 0: the net is not used.
        sweeps: Largest number of sweeps; with 0 sweeps only the vectors determine the matching.
        scales: The treatment of scales, as in `WeightMatching`.
        steps: Steps of the descent on scales, if there is a task; 0: no descent.
        about: Facts about the training, as JSON.
        trained: The training history; None if the matcher was loaded from a file.

    References:
        Navon et al. (2024), Equivariant Deep Weight Space Alignment, section 4.
    """

    net: Metanet
    share: float = 0.5
    sweeps: int = 2
    scales: Scales = "balance"
    steps: int = 30
    about: Mapping[str, Any] = field(default_factory=dict)
    trained: Trained | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.net.settings.head, UnitFeatures):
            raise ValueError(
                f"the net has the head {self.net.settings.head}, but matching needs a vector for each unit; give a net "
                "with the head UnitFeatures, as `fit_matching` makes it"
            )
        if not 0 <= self.share < 1 or self.sweeps < 0 or self.steps < 0:
            raise ValueError(
                f"share={self.share}, sweeps={self.sweeps} and steps={self.steps}: share is 0 or lies between 0 and 1 "
                "(vectors decide alone with sweeps=0, weights alone with share=0), sweeps and steps are not negative"
            )

    def __repr__(self) -> str:
        settings = f"share={self.share}, sweeps={self.sweeps}, scales={self.scales!r}, steps={self.steps}"
        return f"LearnedMatching({settings})"

    @property
    def weight_matching(self) -> WeightMatching:
        """The method that is used instead of the net if `share` is 0."""
        return WeightMatching(scales=self.scales)

    def reads_representatives(self, symmetry: Symmetry, *, has_task: bool) -> bool:
        """Return whether the method may read representatives, that is, rescaled networks. A trained net may not."""
        method = self._descent(self.weight_matching) if has_task and self.steps else self.weight_matching
        return not self.share and method.reads_representatives(symmetry, has_task=has_task)

    def match(self, problem: Problem) -> Results:
        """Match all pairs of networks at once; see `align` and `align_pairs`."""
        if not self.share and not self._descends(problem):
            return self.weight_matching.match(problem)
        placed = self.prepare(problem) if self.share else None
        parts = portions(problem.a, problem.b)
        return join([self._match(problem[part], placed) for part in parts])

    def match_many(self, problem: ManyProblem) -> ManyResult:
        """Match all networks to the first network, as one batch of pairs."""
        if not self.share:
            return self.weight_matching.match_many(problem)
        first, *others = problem.networks
        stacked = {name: torch.stack([other[name] for other in others]) for name in first}
        a = {name: tensor.expand(len(others), *tensor.shape) for name, tensor in first.items()}
        found = self.match(Problem(a, stacked, problem.symmetry, problem.task, problem.generator))
        return problem.result(
            (problem.symmetry.identity(), *found.elements),
            objective=float(found.objective.sum()),
            initial=float(found.initial.sum()),
            history=found.history.sum(1).tolist(),
            is_converged=None if found.is_converged is None else bool(found.is_converged.all()),
            params=(dict(first), *(select(found.params, k) for k in range(len(others)))),
            notes=found.notes,
        )

    def prepare(self, problem: Problem) -> Placed:
        """Adapt the net to the widths of the networks, and define how the groups of their symmetry act on the vectors.

        Raises:
            ValueError: The networks differ from the training networks not only in the numbers of units.
        """
        if not self.net.reads(problem.b):
            self.net.adapt(problem.symmetry)
        return place(problem.symmetry, self.net.layout_of(problem.b), length_of(self.net))

    def _match(self, problem: Problem, placed: Placed | None) -> Results:
        ends = [] if placed is None else self._by_vectors(problem, placed)
        if problem.task is None:
            return ends[0]
        ends.append(self.weight_matching.match(replace(problem, task=None)))
        candidates = Candidates(problem)
        for end in ends:
            candidates.offer(end.element, end.params, end.notes)
        if self._descends(problem):
            starts = [ends[-1].element, *([] if placed is None else [candidates.result().element])]
            for start in starts:
                found = self._descent(start).match(problem)
                candidates.offer(found.element, found.params, found.notes)
        return candidates.result(ends[0].is_converged)

    def _descent(self, init: Start) -> ContinuousDescent:
        """Return the descent on scales that starts from a given element."""
        return ContinuousDescent("midpoint", init=init, steps=self.steps)

    def _by_vectors(self, problem: Problem, placed: Placed) -> list[Results]:
        """Return results of matching by vectors: with sweeps, and also without sweeps if there is a task or no
        sweep.
        """
        vectors = [self.read(params, placed) for params in (problem.a, problem.b)]
        found = responses(placed, *vectors)
        settings = [(1 - self.share, self.sweeps)] if self.sweeps else []
        if problem.task is not None or not settings:
            settings.append((TIES, completing(problem.symmetry)))
        is_open = completing(problem.symmetry) > 0

        def match(weight: float, sweeps: int) -> Results:
            return match_frames(
                problem,
                self.scales,
                lambda frame: match_mixture(problem, frame, found, weight, sweeps, is_completed=is_open),
            )

        return [match(weight, sweeps) for weight, sweeps in settings]

    def _descends(self, problem: Problem) -> bool:
        """Return whether a descent on scales follows the matching."""
        groups = (group for group in problem.symmetry.groups if group.matrix == "none")
        return problem.task is not None and self.steps > 0 and any(kept_scales(problem.symmetry, g) for g in groups)

    @torch.no_grad()
    def read(self, params: Mapping[str, Tensor], placed: Placed) -> dict[str, Tensor]:
        """Return the vectors of networks `[models, ...]`. If a network is repeated by expansion of its tensors, the net
        reads it once.
        """
        count = len(next(iter(params.values())))
        if are_copies(params):
            one = self.read(select(params, slice(0, 1)), placed)
            return {name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in one.items()}
        parts = (
            to_net(select(params, slice(k, k + MATCHED_AT_ONCE)), self.net) for k in range(0, count, MATCHED_AT_ONCE)
        )
        read = [read_vectors(self.net, part, placed) for part in parts]
        device = next(iter(params.values())).device
        return {name: torch.cat([part[name] for part in read]).to(device) for name in read[0]}

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the matcher as one safetensors file; see `weightspace.Metanet.save`."""
        settings = {"share": self.share, "sweeps": self.sweeps, "scales": self.scales, "steps": self.steps}
        return self.net.save(path, about={**self.about, "kind": KIND, "matching": settings}, overwrite=overwrite)


def completing(symmetry: Symmetry) -> int:
    """Return the number of sweeps that complete a matching by vectors. The number is 0 if the symmetry contains only
    permutations and scales.
    """
    return COMPLETING if any(g.signs or g.shifts or g.matrix != "none" for g in symmetry.groups) else 0


@check_arguments
def load_matching(
    path: str | Path, *, module: nn.Module | None = None, make_module: Callable[[], nn.Module] | None = None
) -> LearnedMatching:
    """Load a matcher, a method for `align`, from a file.

    Args:
        path: The file.
        module: The module of the networks. The module is needed for a net with probes, because files never name code to
            run.
        make_module: A function that creates the module if the net has probes. The function replaces `module`.

    Raises:
        FileNotFoundError: The file `path` does not exist.
        ValueError: The file is damaged, or does not contain a matcher.
    """
    net, about = load_net(path, module=module, make_module=make_module)
    if about.get("kind") != KIND:
        raise ValueError(f"{str(path)!r} is a net over networks but not a matcher; `regauge learn matching` writes one")
    known = {name: value for name, value in about.items() if name not in ("kind", "matching")}
    try:
        require_fields(about["matching"], LearnedMatching, "the matcher")
        return LearnedMatching(net, **about["matching"], about=known)
    except DAMAGE as error:
        raise damage("matcher", path, error) from error
