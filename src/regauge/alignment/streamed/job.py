"""Networks in files: whether they are aligned in memory or streamed, and where the result goes.

In memory, networks are read as a whole. Where they need more than the memory that is allowed, they stay on the disk: a
plan says what will be read and held, and an interrupted run can be resumed. In both cases the result, one file or a
folder, is made in a folder beside the output, and takes its place when it is complete.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack, cast

import torch
from torch import Tensor

from regauge.alignment.engine.frames import balances_of
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.streamed.match import StreamedResult, align_streamed
from regauge.alignment.streamed.memory import BASE, SLACK
from regauge.alignment.streamed.plan import Plan, make_plan
from regauge.alignment.streamed.source import move_pieces
from regauge.alignment.streamed.state import load_state, save_state
from regauge.checkpoints.alignments import SUFFIX as ALIGNMENT
from regauge.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.checkpoints.checkpoint import Checkpoint, require_alike, require_same_kinds
from regauge.checkpoints.disk import require_space
from regauge.checkpoints.form import AS_STORED, Form
from regauge.checkpoints.formats.adapters import CONFIG
from regauge.checkpoints.memory_limit import MemoryLimit, size_text
from regauge.checkpoints.names.extra import share_extra
from regauge.checkpoints.names.from_transformers import name_by
from regauge.checkpoints.outputs.provenance import Provenance, name_networks
from regauge.checkpoints.outputs.staging import Staging, require_place
from regauge.checkpoints.padded import Padded, match_adapters
from regauge.checkpoints.writing import SUFFIX, Pieces, Shard, require_writable
from regauge.core.element import Element
from regauge.core.movable import require_movable
from regauge.core.params import Params
from regauge.core.products import library
from regauge.core.progress import Progress, no_progress
from regauge.core.structure import carry
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

NO_OUTPUTS = (".bin", ".pt", ".pth", ".ckpt", ".json", ".gguf", ".onnx", ".npz", ".h5")
"""How the name of an output does not end: it would be that of a folder."""
HELD = 5
"""Copies in float32 of one network that aligning two in memory holds."""
MERGING = 8
"""Copies of each network that merging holds, which aligns them with one another; measured with two and five."""

Network: TypeAlias = Mapping[str, Tensor] | str | Path
"""Parameters by name, or a checkpoint: its path, or opened (which is a mapping, too)."""


class Outcome(TypedDict):
    """Where a result goes, how much may be held for it, and what becomes of an earlier one; see `align`."""

    out: str | Path | None
    memory: int | str | MemoryLimit | None
    resume: bool
    overwrite: bool


@dataclass(frozen=True)
class FileJob:
    """Checkpoints of which one is made; settings are those of `align`.

    Attributes:
        number: That of the checkpoint whose names, dtypes and files the output takes over.
        out: Where the result goes, a `.safetensors` file or a folder; None if it is not written.
        beside: What else is written, if anything, by the name of the output: beside a `.safetensors` file or in a
            folder.
        provenance: What the output says about where it comes from.
        files: Files of an output folder that take the place of those of the source; None for those that are left out.
    """

    checkpoints: tuple[Checkpoint, ...]
    number: int
    out: Path | None
    beside: Callable[[Path], Path] | None = None
    limit: MemoryLimit = field(default_factory=lambda: MemoryLimit.of(None))
    resume: bool = False
    overwrite: bool = False
    provenance: Provenance | None = None
    files: Mapping[str, bytes | None] = field(default_factory=dict)

    @property
    def source(self) -> Checkpoint:
        """The checkpoint whose names, dtypes and further files the output takes over."""
        return self.checkpoints[self.number]

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files of weights that are written."""
        file = None if self.out is None or self.out.suffix != SUFFIX else self.out.name
        return tuple(self.source.layout(file))

    @property
    def is_streamed(self) -> bool:
        """Whether the networks stay on the disk, because in memory they would need more than is allowed."""
        return all(checkpoint.is_lazy for checkpoint in self.checkpoints) and self.nbytes > self.limit.nbytes

    @property
    def nbytes(self) -> int:
        """What aligning in memory holds at once, in bytes; or merging, whose result is like the first network."""
        values = sum(one.nbytes // one.dtype.itemsize for one in self.source.stored.values())
        copies = HELD if self.number else MERGING * len(self.checkpoints)
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints) + 4 * copies * values

    @property
    def needs_memory(self) -> str:
        """The end of a sentence about what cannot be done to streamed networks."""
        return (
            f"needs the networks in memory, which takes {size_text(self.nbytes)}, more than the "
            f"{size_text(self.limit.nbytes)} that are allowed: leave it out, or allow more --memory"
        )

    def named_by(self, symmetry: Symmetry) -> "FileJob":
        """The same checkpoints under the names of a symmetry, where their files have others than their models."""
        return replace(self, checkpoints=share_extra([name_by(one, symmetry) for one in self.checkpoints]))

    def require_output(self) -> None:
        """Refuse an output that cannot be written, before any work is done for it.

        Raises:
            FileExistsError: It, or what is written beside it, exists and may not be replaced.
            FileNotFoundError: Its folder does not exist.
            OSError: The disk has no room for it.
            ValueError: Another process is writing it, or it is another kind of file than `.safetensors`.
        """
        self.require_name()
        if self.out is not None:
            require_space(self.out, sum(shard.nbytes for shard in self.shards))

    def require_name(self) -> None:
        """The same, without a look at the room on the disk."""
        if self.out is None:
            return
        if self.out.suffix in NO_OUTPUTS:
            raise ValueError(f"the output {str(self.out)!r} must end in {SUFFIX}, or be the name of a folder")
        if self.out.name.endswith(ALIGNMENT):
            raise ValueError(f"the output {str(self.out)!r} is the name of an alignment; leave {ALIGNMENT} out")
        require_place(self.out, overwrite=self.overwrite)
        if self.beside is not None and not self.resume and self.out.suffix == SUFFIX:
            beside = self.beside(self.out)
            require_writable(beside, overwrite=self.overwrite, suffixes=(beside.suffix,))

    def write(
        self,
        made: Mapping[str, Tensor] | Pieces,
        save_beside: Callable[[Path], object] | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """Write a result, whole or not at all, if it is to be written; what an interrupted run left is made anew.

        Args:
            made: The result in memory, or its tensors piece by piece.
            save_beside: Writes what belongs beside it, under the name that it is given.
            progress: Shows how much is written.
        """
        if self.out is None:
            return
        pieces = made if callable(made) else lambda name: iter([made[name].detach()])
        shards, overwrite = self.shards, self.overwrite or self.resume
        nbytes, provenance = sum(shard.nbytes for shard in shards), self.provenance
        with Staging(
            self.out, None, resume=False, overwrite=overwrite, provenance=provenance, nbytes=nbytes
        ) as staging:
            staging.beside = dict(self.files)
            staging.write(shards, pieces, progress)
            if save_beside is not None and self.beside is not None:
                save_beside(staging.content / self.beside(staging.out).name)
            staging.publish(shards, self.source)


def open_job(
    networks: Sequence[Network],
    number: int,
    beside: Callable[[Path], Path] | None = None,
    *,
    out: str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    resume: bool = False,
    overwrite: bool = False,
    provenance: Provenance | None = None,
    form: Form = AS_STORED,
) -> FileJob | None:
    """Open networks that are in files, and read their headers; None if they are dictionaries.

    The result has the form of the checkpoint with this number unless another one is given.

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
        checkpoints = tuple(one.written_as(form) for one in checkpoints)
    require_same_kinds(checkpoints)
    adapters = [one for one in checkpoints if one.is_adapter]
    if adapters:
        if len(adapters) < len(checkpoints):
            raise ValueError(
                f"{adapters[0].label!r} is an adapter, and others are networks; name a network with its adapter as "
                "BASE+ADAPTER, or give adapters of one base alone"
            )
        checkpoints = match_adapters(checkpoints, number)
    path, limit, source = None if out is None else Path(out), MemoryLimit.of(memory), checkpoints[number]
    files = {CONFIG: source.config} if isinstance(source, Padded) else {}
    if files and path is not None and path.suffix == SUFFIX:
        raise ValueError(
            f"{source.label!r} gets other ranks, which its {CONFIG} has to say: give a folder as the output"
        )
    return FileJob(checkpoints, number, path, beside, limit, resume, overwrite, provenance, files)


def open_call(
    command: str,
    settings: Mapping[str, Any],
    named: Mapping[str, object],
    networks: Sequence[Network],
    number: int,
    beside: Callable[[Path], Path],
    *,
    symmetry: Symmetry,
    generator: torch.Generator | None,
    element: str | None = None,
    provenance: Provenance | None,
    form: Form,
    **outcome: Unpack[Outcome],
) -> FileJob | None:
    """Open the networks of a call from Python under the names of its symmetry; see `open_job`.

    Unless it is given, the provenance is made of the call: its settings, and the networks by what they are for.

    Raises:
        FileExistsError: The output exists, and may not be replaced.
    """
    if provenance is None:
        seed = None if generator is None else generator.initial_seed()
        provenance = Provenance(command, {**settings, **form.settings}, name_networks(**named), seed, element)
    job = open_job(networks, number, beside, provenance=provenance, form=form, **outcome)
    if job is None:
        return None
    job.require_output()
    return job.named_by(symmetry)


@dataclass(frozen=True)
class StreamedJob:
    """Checkpoints that are aligned to the first one while all of them stay on the disk."""

    job: FileJob
    method: WeightMatching
    plan: Plan

    def with_memory(self, nbytes: int, work: str) -> "StreamedJob":
        """The same with `nbytes` held by what is done after the alignment, `work`, in the plan.

        Raises:
            ValueError: That is more than is allowed.
        """
        limit, peak = self.job.limit.nbytes, int(SLACK * nbytes) + BASE + self.plan.held
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
        inputs |= {"products": library(), "form": repr(self.job.source.form)}
        staging = Staging(
            self.job.out,
            inputs,
            resume=self.job.resume,
            overwrite=self.job.overwrite,
            provenance=self.job.provenance,
            nbytes=sum(shard.nbytes for shard in self.job.shards),
        )
        staging.beside = dict(self.job.files)
        return staging

    def match(self, k: int, staging: Staging, progress: Progress) -> StreamedResult:
        """Align checkpoint k to the first one, from where an earlier run stopped."""
        kept = staging.progress.with_name(f"{k}.{staging.progress.name}")
        return align_streamed(
            self.job.checkpoints[0],
            self.job.checkpoints[k],
            self.plan,
            self.method,
            state=load_state(kept, [group.name for group in self.plan.symmetry.groups]),
            keep=lambda state: save_state(state, kept),
            progress=progress,
        )


def plan_job(job: FileJob, symmetry: Symmetry, method: object = None, task: Task | None = None) -> StreamedJob:
    """Check the checkpoints and plan what is read and held, before anything is written.

    Raises:
        ValueError: The checkpoints differ in their tensors; the method needs networks in memory, or there is a task; or
            no plan holds as little as is allowed.
    """
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
    symmetry = symmetry.given(held[0])
    if any(carry(symmetry, held[0], structure) is not None for structure in held):
        raise ValueError(f"finding an order that carries the structure of one network into another {job.needs_memory}")
    for checkpoint in checkpoints:
        require_movable(symmetry.groups, checkpoint.on_meta(), symmetry.buffers)
        symmetry.require_ones({name: checkpoint[name] for name in symmetry.ones if name in first})
    plan = make_plan(
        symmetry,
        [{name: one.dtype for name, one in checkpoint.stored.items()} for checkpoint in checkpoints],
        memory=job.limit.nbytes,
        balances=balances_of(symmetry, method.scales, None),
        held=job.limit.held(),
    )
    return StreamedJob(job, method, plan)


def align_job(
    streamed: StreamedJob, progress: Progress = no_progress, *, make: Callable[[Element], Pieces] | None = None
) -> StreamedResult:
    """Align the second checkpoint to the first one, and write it with its alignment beside it.

    What is written is the second one, moved, unless `make` says what is made of the element.
    """
    with streamed.begin({"command": "align"}) as staging:
        found = streamed.match(1, staging, progress)
        alignment = Alignment(streamed.plan.symmetry, found.element)
        save_alignment(alignment, staging.content / alignment_path(staging.out).name, overwrite=True)
        pieces = move_pieces(streamed.job.checkpoints[1], streamed.plan.symmetry, found.element)
        pieces = pieces if make is None else make(found.element)
        staging.write(streamed.job.shards, pieces, progress)
        params = cast(Params, staging.publish(streamed.job.shards, streamed.job.source))
        return replace(found, params=params, notes=(*found.notes, *streamed.job.source.notes))
