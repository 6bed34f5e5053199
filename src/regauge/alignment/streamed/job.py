"""Streamed alignment: checkpoints on disk, a plan for reading them, and an output. A later run can resume."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from regauge.alignment.engine.frames import balances_of
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.representatives import NOT_ROTATED, Rotate, has_representatives, require_choice
from regauge.alignment.streamed.charted import ChartPlans
from regauge.alignment.streamed.match import StreamedResult, align_streamed
from regauge.alignment.streamed.memory import BASE, SLACK
from regauge.alignment.streamed.plan import Plan, make_plan
from regauge.alignment.streamed.source import move_pieces
from regauge.alignment.streamed.state import load_state, save_state
from regauge.checkpoints.alignments import Alignment, alignment_path
from regauge.checkpoints.checkpoint import Checkpoint, require_alike
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.outputs.staging import Staging
from regauge.checkpoints.writing import Pieces
from regauge.core.element import Element
from regauge.core.params import Params, require_movable
from regauge.core.products import library
from regauge.core.progress import Progress, no_progress
from regauge.core.structure import carry
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class StreamedJob:
    """Checkpoints on disk that are aligned to the first checkpoint.

    Attributes:
        job: The checkpoints, the output, and the memory limit.
        method: The alignment method.
        symmetry: The symmetry of the networks, in which the sizes of all groups must be known.
        plan: The plan of the first matching, with the memory for all steps.
        chart: The plans for matching representatives, if networks can differ from their representatives.
        rotate: Whether residual streams are rotated, as in `rg.align`.
    """

    job: FileJob
    method: WeightMatching
    symmetry: Symmetry
    plan: Plan
    chart: ChartPlans | None = None
    rotate: Rotate = "auto"

    def with_memory(self, nbytes: int, work: str) -> "StreamedJob":
        """Return a copy whose plan also includes `nbytes`, the memory for the `work` after the alignment.

        Raises:
            ValueError: The required memory exceeds the limit.
        """
        limit, peak = self.job.limit.nbytes, int(SLACK * nbytes) + BASE + self.plan.held
        if peak > limit:
            raise ValueError(
                f"{work} needs {size_text(peak)} of memory for the largest tensor, but only {size_text(limit)} are "
                f"allowed; allow {size_text(peak)} or more"
            )
        return replace(self, plan=replace(self.plan, peak=max(self.plan.peak, peak)))

    def begin(self, settings: Mapping[str, Any]) -> Staging:
        """Return the folder in which the output is prepared.

        An earlier run is resumed only if its inputs and settings are the same.

        Raises:
            ValueError: There is no output, or the earlier run had other inputs.
        """
        files = {
            str(file.resolve()): [file.stat().st_size, file.stat().st_mtime_ns]
            for checkpoint in self.job.checkpoints
            for file in checkpoint.files
        }
        inputs = {"files": files, "symmetry": self.symmetry.to_json(), "method": repr(self.method), **settings}
        inputs |= {"rotate": self.rotate, "products": library(), "form": repr(self.job.source.form)}
        return self.job.stage(inputs)

    def match(self, staging: Staging, progress: Progress) -> list[StreamedResult]:
        """Align all further checkpoints to the first checkpoint, or resume where an earlier run stopped."""

        def run(k: int, stage: str, a: Checkpoint, b: Checkpoint, plan: Plan, method: WeightMatching) -> StreamedResult:
            kept = staging.progress.with_name(f"{k}.{stage}{staging.progress.name}")
            state = crew.first(lambda: load_state(kept, plan.symmetry))
            keep = partial(save_state, path=kept) if staging.is_first else lambda state: None
            return align_streamed(a, b, plan, method, state=state, keep=keep, progress=progress, crew=crew)

        crew = self.job.crew
        found = self._match(run, progress)
        return crew.first(lambda: found)

    def _match(self, run: Callable[..., StreamedResult], progress: Progress) -> list[StreamedResult]:
        first, *others = self.job.checkpoints
        runs = [partial(run, k) for k in range(1, len(others) + 1)]
        if self.chart is not None:
            return self.chart.match(self.job.checkpoints, runs, progress, self.job.crew)
        found = [own("", first, other, self.plan, self.method) for own, other in zip(runs, others, strict=True)]
        if self.rotate == "always":
            found = [replace(one, notes=(*one.notes, NOT_ROTATED)) for one in found]
        return found


def plan_job(
    job: FileJob,
    symmetry: Symmetry,
    method: object = None,
    task: Task | None = None,
    rotate: Rotate = "auto",
    *,
    chart: Symmetry | None = None,
) -> StreamedJob:
    """Check the checkpoints, and plan how they are read and how much memory is needed, before anything is written.

    If translations and gains are removed before matching, `chart` is the whole symmetry, and `symmetry` is the symmetry
    of the representatives.

    Raises:
        ValueError: The checkpoints differ in their tensors, the method needs networks in memory, there is a task, or no
            plan fits into the allowed memory.
    """
    require_choice(rotate)
    if task is not None:
        raise ValueError(f"a task runs the model and {job.needs_memory}")
    method = WeightMatching() if method is None else method
    if not isinstance(method, WeightMatching):
        raise ValueError(f"{method} {job.needs_memory}; streamed networks are matched by WeightMatching()")
    if method.restarts or method.init is not None:
        raise ValueError(f"matching with restarts or init {job.needs_memory}")
    checkpoints = job.checkpoints
    require_alike(checkpoints)
    first = checkpoints[0].stored
    symmetry = symmetry.bind(checkpoints[0].on_meta())
    held = [{n: one[n] for n in symmetry.structure if n in first} for one in checkpoints]
    symmetry = symmetry.given(held[0]).stored_in(first)
    if any(carry(symmetry, held[0], structure) is not None for structure in held):
        raise ValueError(f"finding an order that maps the structure of one network to another {job.needs_memory}")
    for checkpoint in checkpoints:
        require_movable(symmetry.groups, checkpoint.on_meta(), symmetry.buffers)
        symmetry.require_ones({name: checkpoint[name] for name in symmetry.ones if name in first})
    dtypes = [{name: one.dtype for name, one in checkpoint.stored.items()} for checkpoint in checkpoints]

    crew = job.crew
    told = crew.map(lambda _: (job.limit.nbytes, job.limit.held()), range(crew.size))
    limit, held_already = min(limit for limit, _ in told), max(held for _, held in told)  # one plan for all

    def plan(symmetry: Symmetry, method: WeightMatching, chart: Symmetry | None = None) -> Plan:
        balances = balances_of(symmetry, method.scales, None)
        return make_plan(symmetry, dtypes, memory=limit, balances=balances, held=held_already, chart=chart)

    if has_representatives(symmetry) and method.reads_representatives(symmetry, has_task=False):
        plans = ChartPlans.make(symmetry, method, rotate, plan)
        return StreamedJob(job, method, symmetry, plans.first, plans, rotate)
    return StreamedJob(job, method, symmetry, plan(symmetry, method, chart), rotate=rotate)


def align_job(
    streamed: StreamedJob, progress: Progress = no_progress, *, make: Callable[[Element], Pieces] | None = None
) -> StreamedResult:
    """Align the second checkpoint to the first, and write it together with its alignment.

    If `make` is given, the function `make` writes another output, and the aligned checkpoint is not written.
    """
    with streamed.begin({"command": "align"}) as staging:
        (found,) = streamed.match(staging, progress)
        alignment = Alignment(found.symmetry, found.element)
        if staging.is_first:
            alignment.save(staging.content / alignment_path(staging.out).name, overwrite=True)
        pieces = move_pieces(streamed.job.checkpoints[1], found.symmetry, found.element)
        pieces = pieces if make is None else make(found.element)
        staging.write(streamed.job.shards, pieces, progress, streamed.job.checkpoints)
        params = cast(Params, staging.publish(streamed.job.shards, streamed.job.source))
        return replace(found, params=params, notes=(*found.notes, *streamed.job.source.notes))
