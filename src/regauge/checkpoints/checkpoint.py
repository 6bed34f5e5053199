"""Checkpoints in files. Opening a checkpoint reads only the headers; tensors are read on access, or all at once.

Files are read into a small buffer and never memory-mapped. Therefore the pages of the files do not count as memory of
the process.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regauge.checkpoints.form import AS_STORED, Form
from regauge.checkpoints.formats.file_formats import METADATA, format_of, weight_suffixes
from regauge.checkpoints.formats.file_formats import load as load_named
from regauge.checkpoints.formats.headers import PROVENANCE, SHARDING, OpenedFile, StoredPart, StoredTensor, TensorSpec
from regauge.checkpoints.formats.quantized import require_unquantized
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.location import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    files_of,
    find_cached,
    is_adapter,
    locate,
    shards_of,
    split_entry,
    split_sum,
)
from regauge.checkpoints.plain_files import read_json, require_plain
from regauge.checkpoints.writing import SUFFIX, Shard, save
from regauge.core.arguments import check_arguments
from regauge.core.counted import shorten
from regauge.core.params import Params, count_not_finite, require_held, round_to, work_dtype

if TYPE_CHECKING:
    from regauge.checkpoints.formats.changes import Change

READ_BYTES = 1 << 20
"""The number of bytes that are read at once, which stay in the processor's cache until they are converted."""
OWN_STRINGS = (PROVENANCE, SHARDING, "DCP_VERSION")
"""Strings in headers that describe the file and are not copied to other files."""
POINTER = b"version https://git-lfs"
"""The first bytes of the pointer file that Git LFS leaves in place of a large file."""


@dataclass
class Reading:
    """The number of bytes read so far, and the seconds spent on reading without conversions.

    The function `seen`, if set, is called on each read with the file, the offset of the first byte, and the bytes.
    """

    nbytes: int = 0
    seconds: float = 0.0
    seen: Callable[[Path, int, memoryview], None] | None = None


class Checkpoint(Mapping[str, Tensor]):
    """A network in one file, or in shards with an index, opened for reading.

    A checkpoint is a mapping from names to tensors. Tensors of safetensors files are read on each access, until
    `params` reads all of them. Torch files are read completely when they are opened, with `weights_only=True`.
    `FORMATS` lists the formats, and other packages can add formats.

    Attributes:
        label: The checkpoint's name in messages, which is the path that the user gave.
        path: The path of the file, or of the shards' index.
        stored: The location of every tensor, by name. The function `write` uses the names, dtypes and order of
            `stored`.
        metadata: The strings in the header of each file, except the record of how the file was made (its provenance).
        form: The dtype and the largest file size of an output that has the names and files of this checkpoint.
        home: The path of the network without adapters, for example `BASE` for `BASE+ADAPTER`.
        notes: Messages about an output that has the names and files of this checkpoint.
        replaced: New contents for some files, if an output with the names and files of this checkpoint is a folder. The
            content is None for files that the output leaves out.
        read_so_far: The number of bytes read from the disk.
        adapter: The adapter that was added to the base, if the output is also an adapter.
    """

    notes: tuple[str, ...]

    def __init__(
        self,
        label: str,
        path: Path,
        stored: Mapping[str, StoredTensor],
        metadata: Mapping[Path, Mapping[str, str]],
        params: Params | None = None,
    ) -> None:
        self.label, self.path, self.stored, self.metadata = label, path, stored, metadata
        self.read_so_far, self.form = Reading(), AS_STORED
        self.home, self.notes = label, ()
        self.replaced: Mapping[str, bytes | None] = {}
        self.adapter: Checkpoint | None = None
        self._params = params
        self._changes: Mapping[str, tuple[Change, ...]] = {}
        self._adapters: tuple[Path, ...] = ()
        self._files: dict[Path, BufferedReader] = {}
        self._buffer = bytearray(READ_BYTES)

    @classmethod
    def open(cls, path: "str | Path | Checkpoint", *, entry: str | None = None) -> "Checkpoint":
        """Open a checkpoint: read and check the headers of all files.

        Args:
            path: The path of a `.safetensors` file, of the `.index.json` of a sharded checkpoint, or of a folder with a
                checkpoint. A `.pt`, `.pth`, `.bin` or `.ckpt` file must contain a state dict, or a dictionary with a
                state dict under a name such as "state_dict" or "model". `BASE+ADAPTER` is a base changed by the adapter
                in a folder in PEFT's format. `org/model` is a model in the cache of the Hugging Face hub. An open
                checkpoint is returned unchanged.
            entry: The dictionary entry that is read, such as "state_dict_ema". The path `FILE:NAME` also selects the
                entry NAME. By default, the usual entry is read, and a warning in the log names the other entries.

        Raises:
            FileNotFoundError: The file, or a shard that its index names, does not exist.
            ValueError: The file has an unknown format, is damaged or incomplete, contains objects other than tensors,
                or holds a quantized network. The error is also raised if an index names missing files.
        """
        if isinstance(path, Checkpoint):
            return path
        require_plain(path)
        parts = split_sum(str(path))
        if parts is not None:
            return cls.open(parts[0]).changed_by(Path(parts[1]))
        if entry is None:
            path, entry = split_entry(str(find_cached(str(path)) or path))
        file = locate(path)
        index = shards_of(file) if file.name.endswith(".index.json") else {}
        found: dict[str, StoredTensor] = {}
        headers: dict[Path, Mapping[str, str]] = {}
        loaded: Params = {}
        everywhere: dict[str, list[str]] = {}
        for shard in [file.parent / name for name in dict.fromkeys(index.values())] or [file]:
            stored, headers[shard], params, files = _read(shard, entry)
            own = [name for name in stored if not index or index.get(name) == shard.name]
            for name in stored:
                everywhere.setdefault(name, []).append(shard.name)
            headers |= {path: headers.get(path, {}) for path in files}
            found |= {name: stored[name] for name in own}
            loaded |= {name: params[name] for name in own} if params is not None else {}
        absent = [name for name in index if name not in found]
        if absent:
            raise ValueError(
                f"{str(file)!r} says that {absent[0]!r} is in {index[absent[0]]!r}, but it is not; index and shards "
                "belong to different checkpoints: fetch both again"
            )
        if index:
            _require_named(file, index, everywhere)
        require_unquantized(str(path), file, {name: one.dtype for name, one in found.items()})
        return cls(str(path) if entry is None else f"{path}:{entry}", file, found, headers, loaded or None)

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name) if self._params is None else self._params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored if self._params is None else self._params)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __len__(self) -> int:
        return len(self.stored if self._params is None else self._params)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        for file in self._files.values():  # A view that is no longer used leaves the files of its source open.
            file.close()

    def close(self) -> None:
        """Close the files. A later read opens the files again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def params(self) -> Params:
        """All tensors, on the CPU, with the dtypes of the files. All tensors are read once and then kept in memory."""
        if self._params is None:
            self._params = {name: self.read(name) for name in self.stored}
            self.close()
        return self._params

    @property
    def header(self) -> Mapping[str, str]:
        """The strings in the header of the first file, such as the description of an INR."""
        return next(iter(self.metadata.values()))

    @property
    def nbytes(self) -> int:
        """The total size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    @property
    def is_safetensors(self) -> bool:
        """Whether tensors can be read from the disk one by one. Tensors of torch files cannot be read one by one."""
        return all(tensor.start is not None for tensor in self.stored.values())

    @property
    def is_lazy(self) -> bool:
        """Whether tensors are read from the disk one by one: safetensors files, until all tensors are in memory."""
        return self._params is None and self.is_safetensors

    @property
    def files(self) -> tuple[Path, ...]:
        """All files from which the checkpoint is read."""
        return (*self.metadata, *self._adapters)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of tensors in the files that no class of the model has, if the files were searched for them."""
        return ()

    @property
    def is_adapter(self) -> bool:
        """Whether the checkpoint contains the factors of an adapter instead of a network."""
        return self.path.name in ADAPTER_FILES and is_adapter(self.path.parent)

    @property
    def is_folder(self) -> bool:
        """Whether the caller gave a folder or an index instead of a file. For a folder or an index, an output may also
        be a folder.
        """
        return Path(self.home).is_dir() or self.path.name.endswith((".index.json", METADATA))

    def on_meta(self) -> Params:
        """Return every tensor uninitialized on the meta device, with its name, shape and dtype."""
        if self._params is not None:
            return {name: tensor.to("meta") for name, tensor in self._params.items()}
        return {n: torch.empty(s.shape, dtype=self.dtype_of(n), device="meta") for n, s in self.stored.items()}

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read: the stored dtype, or a wider dtype for an adapter or for
        `form`.
        """
        if self._params is not None:
            return self._params[name].dtype
        stored = self.stored[name].dtype
        return self.form.work_dtype(work_dtype(stored) if name in self._changes else stored)

    def layout(self, file: str | None = None) -> list[Shard]:
        """Return the files of an output, with the names, dtypes and order of this checkpoint or as `form` specifies.

        The output has as many files as this checkpoint, or a single file named `file`. Tensors with wide dtypes come
        first, which keeps all tensors aligned.
        """
        is_parted = any(one.is_parted for one in self.stored.values())
        if file is None and is_parted:
            every = [TensorSpec(one.name, one.shape, one.dtype) for one in self.stored.values()]
            stem = METADATA if self.path.name == METADATA else "model"
            count = sum(path.name != METADATA for path in self.metadata)
            return self.form.layout([Shard("", tuple(every), self.header)], stem, max(1, count))
        by_file: dict[Path, list[TensorSpec]] = {path: [] for path in self.metadata}
        for one in self.stored.values():
            by_file[one.file].append(TensorSpec(one.name, one.shape, one.dtype))
        stem = Path(self.path.name.removesuffix(".index.json")).stem if self.is_safetensors else "model"
        if file is None and (len(by_file) > 1 or self.form.shard_size is not None):
            names = {p: p.name if p.suffix == SUFFIX else p.stem.replace("pytorch_", "") + SUFFIX for p in by_file}
            shards = [Shard(names[path], tuple(own), self.metadata[path]) for path, own in by_file.items()]
            return self.form.layout(shards, stem)
        if self.form.shard_size is not None:
            raise ValueError(
                f"the output is one file, {file!r}, so it has no shards; name a folder, or leave the shard size out"
            )
        every = sorted((spec for own in by_file.values() for spec in own), key=lambda spec: -spec.dtype.itemsize)
        own = ADAPTER_FILES[0] if self.is_adapter else "model.safetensors"
        return self.form.layout([Shard(file or own, tuple(every), self.header)], stem)

    def _take_over(self, source: "Checkpoint") -> None:
        """Copy the files, notes and metadata of another checkpoint, because this object is a view of the other
        checkpoint.
        """
        self.read_so_far, self.form, self.home = source.read_so_far, source.form, source.home
        self.notes, self.replaced, self.adapter = source.notes, source.replaced, source.adapter

    def with_params(self, params: Mapping[str, Tensor]) -> "Checkpoint":
        """Return a checkpoint of the same files with other parameters. A tied tensor is written under only one name."""
        absent = [name for name in self.stored if name not in params]
        if absent:
            raise KeyError(f"the parameters lack {shorten(absent)}, which {self.label} has; give all of its tensors")
        result = copy(self)
        result._params, result._changes, result._files = dict(params), {}, {}
        return result

    def replacing(self, files: Mapping[str, bytes | None]) -> "Checkpoint":
        """Return a checkpoint whose output folder has given files instead of the original files; see `replaced`."""
        result = copy(self)
        result.replaced, result._files = {**self.replaced, **files}, {}
        return result

    def resized(self, params: Mapping[str, Tensor]) -> "Checkpoint":
        """Return a checkpoint of the same files in which tensors have the sizes in `params`, under the model's names.

        A second name of a tied tensor is written only if the files have this name.
        """
        result = Checkpoint(self.label, self.path, {}, self.metadata)
        result._take_over(self)
        first, seen, stored = next(iter(self.stored.values())), set[int](), {}
        for name, tensor in params.items():
            known = self.stored.get(name)
            if known is None and (id(tensor) in seen or name not in self):
                continue
            seen.add(id(tensor))
            dtype = tensor.dtype if known is None else known.dtype
            size, nbytes = tuple(tensor.shape), tensor.numel() * dtype.itemsize
            stored[name] = (known or first)._replace(name=name, dtype=dtype, shape=size, nbytes=nbytes)
        result.stored = stored
        return result.with_params(params)

    def written_as(self, form: Form) -> "Checkpoint":
        """Return a copy whose output is written in another form (dtype and file size).

        The copy reads tensors in a dtype that is wide enough for `form`.
        """
        result = copy(self)
        result.form, result._files = form, {}
        if result._params is not None:
            result._params = {name: t.to(form.work_dtype(t.dtype)) for name, t in result._params.items()}
        return result

    def as_stored(self) -> Params:
        """Return all tensors by their names in the files."""
        return {name: self[name] for name in self.stored}

    def from_stored(self, params: Mapping[str, Tensor]) -> Params:
        """Return tensors under the names and in the shapes of this checkpoint, given tensors as in the files."""
        return dict(params)

    def view_alike(self, other: "Checkpoint") -> "Checkpoint":
        """Return another checkpoint, whose files have equal tensor names, under the tensor names of this checkpoint."""
        return other

    def write(self, path: str | Path, *, overwrite: bool = False, provenance: str | None = None) -> Path:
        """Write the checkpoint to one `.safetensors` file, with its tensor names and header, as `form` specifies."""
        (shard,) = self.layout(Path(path).name)
        values = self.as_stored()
        params = {name: round_to(values[name], dtype, name) for name, _, dtype in shard.tensors}
        origin = {} if provenance is None else {PROVENANCE: provenance}
        return save(params, path, overwrite=overwrite, metadata={**self.header, **origin})

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of rows, converted to a dtype chunk by chunk."""
        if self._params is not None:
            tensor = self._params[name]
            part = tensor if rows is None else tensor[rows[0] : rows[1]]
            return part.to(dtype or tensor.dtype, copy=True)
        if name in self._changes:
            work = work_dtype(dtype or self.dtype_of(name))
            changed = self._read_changed(name, self._changes[name], rows, work)
            require_held(name, changed, (self._read_stored(name, rows, work),))
            return round_to(changed, dtype or self.dtype_of(name), name)
        return self._read_stored(name, rows, dtype or self.dtype_of(name))

    def count_not_finite(self, most: int = 16 * 2**30) -> dict[str, int] | None:
        """Return the number of entries that are NaN or Inf, for each tensor that contains such entries.

        Args:
            most: The largest size of a checkpoint, in bytes, at which all tensors are read. For a larger checkpoint,
                the result is None.
        """
        if self.nbytes > most:
            return None
        found = {name: count_not_finite(self.read(name)) for name in self.stored}
        return {name: number for name, number in found.items() if number}

    def _read_changed(
        self, name: str, changes: "Sequence[Change]", rows: tuple[int, int] | None, work: torch.dtype
    ) -> Tensor:
        if not changes:
            return (
                self._read_stored(name, rows, work) if self._params is None else self.read(name, rows=rows, dtype=work)
            )
        return changes[-1].apply(lambda part: self._read_changed(name, changes[:-1], part, work), rows)

    def _read_stored(self, name: str, rows: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
        stored = self.stored[name]
        if stored.is_parted:
            return self._read_parts(stored, rows, dtype)
        shape, start = stored.shape, stored.start
        assert start is not None
        if rows is not None:
            first, end = rows
            row = stored.nbytes // shape[0] if shape[0] else 0
            shape, start = (end - first, *shape[1:]), start + first * row
        result = torch.empty(shape, dtype=dtype)
        self._read_flat(stored, stored.file, start, result.view(-1))
        return result

    def _read_parts(self, stored: StoredTensor, rows: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
        """Return a tensor, or a range of its first axis, from the stored chunks that overlap the range."""
        first, end = rows if rows is not None else (0, stored.shape[0] if stored.shape else 1)
        result = torch.empty(stored.shape if rows is None else (end - first, *stored.shape[1:]), dtype=dtype)
        for part in stored.parts:
            if not stored.shape:
                self._read_flat(stored, part.file, part.start, result.view(-1))
                continue
            begin, stop = max(first, part.offsets[0]), min(end, part.offsets[0] + part.sizes[0])
            if begin >= stop:
                continue
            inner = tuple(slice(o, o + s) for o, s in zip(part.offsets[1:], part.sizes[1:], strict=True))
            target = result[(slice(begin - first, stop - first), *inner)]
            own = begin - part.offsets[0], stop - part.offsets[0]
            if part.strides is None and target.is_contiguous():
                row = math.prod(part.sizes[1:]) * stored.dtype.itemsize
                self._read_flat(stored, part.file, part.start + own[0] * row, target.view(-1))
            else:
                target.copy_(self._read_part(stored, part, own, dtype))
        return result

    def _read_part(self, stored: StoredTensor, part: StoredPart, rows: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return rows of a stored chunk whose bytes are not contiguous in the tensor."""
        if part.strides is None:
            count = math.prod(part.sizes[1:])
            values = torch.empty(rows[1] - rows[0], *part.sizes[1:], dtype=dtype)
            self._read_flat(stored, part.file, part.start + rows[0] * count * stored.dtype.itemsize, values.view(-1))
            return values
        whole = torch.empty(math.prod(part.sizes), dtype=dtype)
        self._read_flat(stored, part.file, part.start, whole)
        return whole.as_strided(part.sizes, part.strides)[rows[0] : rows[1]]

    def _read_flat(self, stored: StoredTensor, file: Path, start: int, flat: Tensor) -> None:
        """Fill a tensor with stored values, beginning at a byte of a file."""
        size, done = stored.dtype.itemsize, 0
        nbytes = flat.numel() * size
        while done < nbytes:
            length = min(READ_BYTES, nbytes - done)
            self._fill(stored.name, file, start + done, length)
            piece = torch.frombuffer(self._buffer, dtype=stored.dtype, count=length // size)
            flat[done // size : (done + length) // size] = piece
            done += length

    def changed_by(self, folder: Path) -> "Checkpoint":
        """Return the network changed by the adapter in a folder. The changes are computed on each read."""
        from regauge.checkpoints.formats.adapters import find_tied, place_changes, read_changes
        from regauge.checkpoints.names.adapted import changes_of_files, require_untied

        with Checkpoint.open(folder) as adapter:
            trained = read_changes(folder, adapter.params)
        placed = place_changes(folder, trained, {name: one.shape for name, one in self.stored.items()}, self.read)
        tied = find_tied(self.path.parent, {name: self.stored[name].shape for name in placed or ()})
        changes: Mapping[str, tuple[Change, ...]] = placed or {}
        if placed is None or tied:
            require_untied(self, folder, tied)
            changes = changes_of_files(self, folder, trained) if placed is None else placed
        result = copy(self)
        result.label, result._files = f"{self.label}+{folder}", {}
        result._adapters = (*self._adapters, folder / ADAPTER_CONFIG, *adapter.metadata)
        if self._params is None:
            result._changes = {**self._changes, **{n: (*self._changes.get(n, ()), *own) for n, own in changes.items()}}
            return result
        result._params = dict(self._params)
        for name, own in changes.items():
            result._params[name] = self._read_changed(name, own, None, work_dtype(self._params[name].dtype))
        return result

    def _fill(self, name: str, path: Path, start: int, length: int) -> None:
        before = time.perf_counter()
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = path.open("rb")
        file.seek(start)
        part = memoryview(self._buffer)[:length]
        if file.readinto(part) < length:
            raise ValueError(f"{str(path)!r} ended inside {name!r}: it changed while it was read; fetch it again")
        self.read_so_far.nbytes += length
        self.read_so_far.seconds += time.perf_counter() - before
        if self.read_so_far.seen is not None:
            self.read_so_far.seen(path, start, part)


class CheckpointView(Checkpoint):
    """A checkpoint that reads another checkpoint and changes its names, shapes or values.

    Attributes:
        source: The checkpoint that this view reads.
    """

    def __init__(self, source: Checkpoint, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__(source.label, source.path, stored, source.metadata)
        self.source = source
        self._take_over(source)

    @property
    def is_lazy(self) -> bool:
        """Whether tensors are read from the disk one by one."""
        return self._params is None and self.source.is_lazy

    @property
    def files(self) -> tuple[Path, ...]:
        """All files from which the checkpoint is read."""
        return self.source.files

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read."""
        return self.source.dtype_of(name) if self._params is None else super().dtype_of(name)

    def close(self) -> None:
        """Close the files. A later read opens the files again."""
        super().close()
        self.source.close()


@check_arguments
def load(path: str | Path, *, entry: str | None = None) -> Params:
    """Read all parameters and buffers of a checkpoint to the CPU, with the dtypes of the files.

    Args:
        path: The path, as for `Checkpoint.open`.
        entry: The network to read from a training checkpoint, such as "state_dict_ema".
    """
    with Checkpoint.open(path, entry=entry) as checkpoint:
        return checkpoint.params


def require_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise an error unless all checkpoints have tensors with the same names and shapes."""
    first, *others = checkpoints
    for other in others:
        match(other.on_meta(), first.on_meta(), other.label, first.label)


def require_same_kinds(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise an error if a tensor has a floating-point dtype in one checkpoint and an integer dtype in another."""
    first, *others = checkpoints
    for other in others:
        for name in [name for name in first.stored if name in other.stored]:
            tensor = first.stored[name]
            if other.stored[name].dtype.is_floating_point != tensor.dtype.is_floating_point:
                raise ValueError(
                    f"{name!r} is {tensor.dtype} in {first.label} and {other.stored[name].dtype} in {other.label}; "
                    "floating-point numbers and integers cannot be compared: convert one of them"
                )


def _require_named(file: Path, index: Mapping[str, str], shards: Mapping[str, Sequence[str]]) -> None:
    """Raise an error for ambiguous shards: tensors that the index omits or that two shards contain."""
    left_out = [name for name in shards if name not in index]
    if left_out:
        where = shards[left_out[0]][0]
        raise ValueError(
            f"{str(file)!r} leaves out {shorten(left_out)}, which {where!r} has; index and shards belong to different "
            "checkpoints: fetch all again"
        )
    twice = next((name for name, own in shards.items() if len(own) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{twice!r} is in {shorten(shards[twice])} of {str(file)!r}, so it is ambiguous; fetch index and shards "
            "again"
        )


def _read(file: Path, entry: str | None) -> OpenedFile:
    """Open a file by its format, and return the header's strings without the provenance."""
    require_plain(file)
    with file.open("rb") as stream:
        begin = stream.read(len(POINTER))
        if begin == POINTER:
            raise ValueError(
                f"{str(file)!r} is a pointer to a file in Git LFS; run `git lfs pull` to fetch the file itself"
            )
    known = format_of(file, begin)
    if known is None:
        read = ", ".join(weight_suffixes(is_read=True))
        raise ValueError(
            f"{str(file)!r} ends in {file.suffix!r}, but a checkpoint is {read}, .index.json (sharded) or a folder "
            "that holds one of them; convert it, or rename it if that is wrong"
        )
    if entry is not None and not known.has_entries:
        raise ValueError(f"{str(file)!r} contains only one network and has no entry {entry!r}; leave out ':{entry}'")
    opened: OpenedFile = load_named(known.opener)(file, entry)
    if SHARDING in opened.metadata:
        from regauge.checkpoints.formats.shards import gather_shards  # only such files need it

        opened = gather_shards({path: load_named(known.opener)(path, entry) for path in files_of(file)})
    return opened._replace(metadata={k: text for k, text in opened.metadata.items() if k not in OWN_STRINGS})


def index_metadata(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the metadata in the index of a sharded checkpoint; empty for other checkpoints."""
    if not checkpoint.path.name.endswith(".index.json"):
        return {}
    found = read_json(checkpoint.path).get("metadata")
    return found if isinstance(found, dict) else {}
