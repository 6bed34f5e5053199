"""The path of an output, and the form in which the output is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from regauge.checkpoints.form import Form
from regauge.checkpoints.formats.file_formats import is_single_file
from regauge.checkpoints.location import ALIGNMENT
from regauge.checkpoints.outputs.provenance import Provenance
from regauge.core.progress import Crew


@dataclass(frozen=True, init=False)
class Output:
    """The path of an output, one `.safetensors` file or a folder, and the form in which the output is written.

    The output appears at its path only when it is completely on the disk. A plain path, `out="OUT"`, is equivalent to
    `Output("OUT")`.

    Attributes:
        path: A `.safetensors` file, or a folder. The output has the names and files of one network, the source network.
            A folder also gets the source network's other files, such as its configuration.
        overwrite: Whether an existing output of this name may be replaced. Files in a folder that do not belong to a
            checkpoint are kept.
        resume: Whether to continue an interrupted run from its files. Work on networks in memory is not saved and is
            repeated.
        dtype: The dtype, or its name, to which floating-point tensors are rounded once. If the dtype cannot represent
            an entry, an error is raised. By default, each tensor keeps its dtype in the source network.
        shard_size: The largest total size of the tensors in one file of a folder: bytes, or a string such as "5GB". By
            default, the tensors are split as in the source network.
        provenance: The provenance of the output. By default, the provenance describes the call that writes the output.
        page: A function that renders the JSON file of a report as an HTML page, for functions that write a report. By
            default there is no page.
        shared: Whether the other processes that torchrun or Slurm started make the same call, and share the work. Work
            can be shared in `rg.align`, `rg.merge` and recipes, if checkpoints are streamed and the output is a folder.

    Raises:
        ValueError: The dtype is unknown, or the shard size cannot be read or is not positive.
    """

    path: Path
    overwrite: bool = False
    resume: bool = False
    dtype: torch.dtype | None = None
    shard_size: int | str | None = None
    provenance: Provenance | None = None
    page: Callable[[Path], str] | None = None
    shared: bool = False

    def __init__(
        self,
        path: str | Path,
        overwrite: bool = False,
        resume: bool = False,
        dtype: torch.dtype | str | None = None,
        shard_size: int | str | None = None,
        provenance: Provenance | None = None,
        page: Callable[[Path], str] | None = None,
        shared: bool = False,
    ) -> None:
        form = Form.of(dtype, shard_size)
        given = (Path(path), overwrite, resume, form.dtype, form.shard_size, provenance, page, shared)
        for name, value in zip(self.__dataclass_fields__, given, strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, out: "Output | str | Path") -> "Output":
        """Return the given output, or an output with the given path."""
        return out if isinstance(out, Output) else cls(out)

    @property
    def is_file(self) -> bool:
        """Whether the output is one weight file instead of a folder."""
        return is_single_file(self.path)

    @property
    def crew(self) -> Crew:
        """The processes that together write the output."""
        if not self.shared:
            return Crew()
        from regauge.checkpoints.outputs.processes import join  # imports torch.distributed

        return join()

    def require_alone(self, work: str) -> None:
        """Raise a ValueError if the output is shared, because a single process does the work."""
        if self.shared:
            raise ValueError(f"{work} cannot be shared by processes; leave `shared=True` out, and start one process")

    @property
    def form(self) -> Form:
        """The form in which the network is written."""
        return Form.of(self.dtype, self.shard_size)


def alignment_label(out: Output | str | Path | None) -> str:
    """Return the file name of an output's alignment, as a provenance states it.

    The file name of the alignment does not depend on the name of the output.
    """
    return f"*{ALIGNMENT}" if out is None or Output.of(out).is_file else f"regauge{ALIGNMENT}"
