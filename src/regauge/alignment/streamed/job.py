"""Networks in files: whether they are aligned in memory or streamed, and where the result goes.

In memory, networks are read as a whole and the result is written. Where they need more than the memory that is allowed,
they stay on the disk: a plan says what will be read and held, everything is made in a folder beside the output, and an
interrupted run can be resumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from torch import Tensor

from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.streamed.climb import StreamedResult, align_streamed
from regauge.alignment.streamed.plan import Plan, make_plan
from regauge.alignment.streamed.source import move_pieces
from regauge.alignment.streamed.state import load_state, save_state
from regauge.core.balance import has_balance
from regauge.core.movable import require_movable
from regauge.core.params import Params
from regauge.core.products import library
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.storage.checkpoints.adapters import require_same_adapters
from regauge.storage.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.storage.checkpoints.checkpoint import Checkpoint, require_alike
from regauge.storage.checkpoints.disk import require_space
from regauge.storage.checkpoints.form import AS_STORED, Form
from regauge.storage.checkpoints.memory_limit import MemoryLimit, size_text
from regauge.storage.checkpoints.provenance import Provenance
from regauge.storage.checkpoints.staging import Staging, require_place
from regauge.storage.checkpoints.writing import SUFFIX, Shard, require_writable

HELD = 5
"""Copies in float32 of one network that aligning in memory holds."""

Network: TypeAlias = Mapping[str, Tensor] | str | Path
"""Parameters by name, or a checkpoint: its path, or opened (which is a mapping, too)."""


@dataclass(frozen=True)
class FileJob:
    """Checkpoints that are aligned to the first one, or merged; settings are those of `align`.

    Attributes:
        source: The number of the checkpoint whose names, dtypes and files the output takes over.
        out: Where the result goes, a `.safetensors` file or a folder; None if it is not written.
        beside: What else is written, by the name of the output: beside a `.safetensors` file or in a folder.
        provenance: What the output says about where it comes from.
    """

    checkpoints: tuple[Checkpoint, ...]
    source: int
    out: Path | None
    beside: Callable[[Path], Path]
    limit: MemoryLimit
    resume: bool = False
    overwrite: bool = False
    provenance: Provenance | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the networks stay on the disk: to resume, to make a folder of folders, or because they are large."""
        is_folder = self.out is not None and self.out.suffix != SUFFIX and all(c.is_folder for c in self.checkpoints)
        if self.resume or is_folder:
            return True
        if not all(checkpoint.is_lazy for checkpoint in self.checkpoints):
            return False
        values = sum(one.nbytes // one.dtype.itemsize for one in self.checkpoints[0].stored.values())
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints) + 4 * HELD * values > self.limit.nbytes

    def require_output(self) -> None:
        """Refuse an output that cannot be written, before any work is done for it.

        Raises:
            FileExistsError: It, or what is written beside it, exists and may not be replaced.
            FileNotFoundError: Its folder does not exist.
            OSError: The disk has no room for it.
            ValueError: Another process is writing it, or it is another kind of file than `.safetensors`.
        """
        if self.out is None:
            return
        if self.is_streamed:
            require_place(self.out, overwrite=self.overwrite)
        else:
            require_writable(self.out, overwrite=self.overwrite)
            require_space(self.out, self.checkpoints[self.source].nbytes)
        if not self.resume and self.out.suffix == SUFFIX:
            beside = self.beside(self.out)
            require_writable(beside, overwrite=self.overwrite, suffixes=(beside.suffix,))

    def write(self, params: Mapping[str, Tensor]) -> None:
        """Write a result that is in memory, if it is to be written."""
        if self.out is not None:
            text = None if self.provenance is None else self.provenance.to_json()
            self.checkpoints[self.source].with_params(params).write(self.out, overwrite=self.overwrite, provenance=text)


def open_job(
    networks: Sequence[Network],
    source: int,
    beside: Callable[[Path], Path],
    *,
    out: str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    resume: bool = False,
    overwrite: bool = False,
    provenance: Provenance | None = None,
    form: Form = AS_STORED,
) -> FileJob | None:
    """Open networks that are in files, and read their headers; None if they are dictionaries.

    The result has the form of the checkpoint with the number `source` unless another one is given.

    Raises:
        TypeError: Some networks are in files, and others are dictionaries, or all are and the result is to be written.
        FileNotFoundError: A checkpoint is not there.
        ValueError: A checkpoint is damaged, or the memory cannot be read.
    """
    checkpoints = tuple(Checkpoint.open(one) for one in networks if isinstance(one, str | Path | Checkpoint))
    if not checkpoints and out is None and memory is None and not resume and form == AS_STORED:
        return None
    if len(checkpoints) < len(networks):
        raise TypeError(
            "networks with `out`, `memory`, `resume`, `dtype` or `shard_size` must all be checkpoints, given by their "
            "paths; save the dictionaries as .safetensors, or give dictionaries only and save the result yourself"
        )
    if form != AS_STORED:
        checkpoints = tuple(one.written_as(form) if k == source else one for k, one in enumerate(checkpoints))
    adapters = [one for one in checkpoints if one.is_adapter]
    if adapters:
        if len(adapters) < len(checkpoints):
            raise ValueError(
                f"{adapters[0].label!r} is an adapter, and others are networks; name a network with its adapter as "
                "BASE+ADAPTER, or give adapters of one base alone"
            )
        require_same_adapters([one.path.parent for one in adapters], adapters)
    path, limit = None if out is None else Path(out), MemoryLimit.of(memory)
    return FileJob(checkpoints, source, path, beside, limit, resume, overwrite, provenance)


@dataclass(frozen=True)
class StreamedJob:
    """Checkpoints that are aligned to the first one while all of them stay on the disk, in the files `shards`."""

    job: FileJob
    method: WeightMatching
    plan: Plan
    shards: tuple[Shard, ...]

    @property
    def source(self) -> Checkpoint:
        """The checkpoint whose names, dtypes and further files the output takes over."""
        return self.job.checkpoints[self.job.source]

    def with_memory(self, nbytes: int, work: str) -> "StreamedJob":
        """The same with `nbytes` held by what is done after the alignment, `work`, in the plan.

        Raises:
            ValueError: That is more than is allowed.
        """
        limit, peak = self.job.limit.nbytes, nbytes + self.plan.held
        if peak > limit:
            raise ValueError(
                f"{work} holds {size_text(peak)} at once, for the largest tensor of all, more than the "
                f"{size_text(limit)} that memory allows; allow {size_text(peak)} or more"
            )
        return replace(self, plan=replace(self.plan, peak=max(self.plan.peak, peak)))

    def begin(self, settings: Mapping[str, Any]) -> Staging:
        """The folder in which the output is made; a run is resumed only from the same inputs and settings.

        Raises:
            ValueError: There is no output, or what is to be resumed was made from other inputs.
        """
        if self.job.out is None:
            raise ValueError(
                "these networks do not fit in the memory that is allowed: say with `out` where the result is to be "
                "written, a .safetensors file or a folder, or allow more memory"
            )
        files = {
            str(file.resolve()): [file.stat().st_size, file.stat().st_mtime_ns]
            for checkpoint in self.job.checkpoints
            for file in checkpoint.files
        }
        inputs = {"files": files, "symmetry": self.plan.symmetry.to_json(), "method": repr(self.method), **settings}
        inputs |= {"products": library(), "form": repr(self.source.form)}
        return Staging(
            self.job.out,
            inputs,
            resume=self.job.resume,
            overwrite=self.job.overwrite,
            provenance=self.job.provenance,
            nbytes=sum(shard.nbytes for shard in self.shards),
        )

    def match(self, k: int, staging: Staging, progress: Progress) -> StreamedResult:
        """Align checkpoint k to the first one, from where an earlier run stopped."""
        kept = staging.progress.with_name(f"{k}.{staging.progress.name}")
        return align_streamed(
            self.job.checkpoints[0],
            self.job.checkpoints[k],
            self.plan,
            self.method,
            state=load_state(kept, [group.name for group in self.plan.symmetry.groups]) if kept.exists() else None,
            keep=lambda state: save_state(state, kept),
            progress=progress,
        )


def plan_job(job: FileJob, symmetry: Symmetry, method: object = None, task: Task | None = None) -> StreamedJob:
    """Check the checkpoints and plan what is read and held, before anything is written.

    Raises:
        ValueError: The checkpoints are torch files, or differ in their tensors; the method needs networks in memory, or
            there is a task; or no plan holds as little as is allowed.
    """
    if task is not None:
        raise ValueError("a task runs the model and needs it in memory; leave it out, or allow more memory")
    method = WeightMatching() if method is None else method
    if not isinstance(method, WeightMatching):
        raise ValueError(
            f"{method} needs the networks in memory; streaming matches weights only: take WeightMatching(), or allow "
            "more memory and write to a .safetensors file"
        )
    if method.restarts or method.init is not None:
        raise ValueError("restarts and init need the networks in memory; leave them out, or allow more memory")
    checkpoints = job.checkpoints
    whole = [checkpoint.label for checkpoint in checkpoints if not checkpoint.is_safetensors]
    if whole:
        raise ValueError(
            f"{whole[0]!r} cannot be read piece by piece; convert it to .safetensors, or allow more memory and write "
            "to a .safetensors file"
        )
    require_alike(checkpoints)
    first = checkpoints[0].stored
    symmetry = symmetry.bind(checkpoints[0].on_meta())
    for checkpoint in checkpoints:
        require_movable(symmetry.groups, checkpoint.on_meta(), symmetry.buffers)
        symmetry.require_ones({name: checkpoint[name] for name in symmetry.ones if name in first})
    plan = make_plan(
        symmetry,
        [{name: one.dtype for name, one in checkpoint.stored.items()} for checkpoint in checkpoints],
        memory=job.limit.nbytes,
        is_balanced=method.scales == "balance" and has_balance(symmetry),
        held=job.limit.held(),
    )
    file = None if job.out is None or job.out.suffix != SUFFIX else job.out.name
    return StreamedJob(job, method, plan, tuple(checkpoints[job.source].layout(file)))


def align_job(streamed: StreamedJob, progress: Progress = no_progress) -> StreamedResult:
    """Align the second checkpoint to the first one, and write it with its alignment beside it."""
    with streamed.begin({"command": "align"}) as staging:
        found = streamed.match(1, staging, progress)
        alignment = Alignment(streamed.plan.symmetry, found.element)
        save_alignment(alignment, staging.content / alignment_path(staging.out).name, overwrite=True)
        pieces = move_pieces(streamed.job.checkpoints[1], streamed.plan.symmetry, found.element)
        staging.write(streamed.shards, pieces, progress)
        return replace(found, params=cast(Params, staging.publish(streamed.shards, streamed.source)))
