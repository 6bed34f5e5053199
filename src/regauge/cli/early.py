"""Checks before torch is imported: missing files, existing outputs, optional dependencies that are not installed."""

from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from regauge.checkpoints.location import find_cached, say_absent, split_entry
from regauge.checkpoints.plain_files import require_suffix
from regauge.cli.options import CHECKPOINT, Endings, Existing, UsageError

TRANSFORMERS = "a folder with config.json needs transformers"
HDF5, DASK = "reading HDF5 needs h5py", "Dask is not installed"


def require_ready(options: Any) -> None:
    """Raise an error if a file is missing, an output exists, or an optional dependency (extra) is not installed.

    Raises:
        FileExistsError: The output exists.
        FileNotFoundError: A checkpoint does not exist.
        ImportError: An extra is not installed.
        UsageError: A file that is not a checkpoint does not exist.
        ValueError: The suffix of the output is not the suffix of a picture.
    """
    options = getattr(options, "command", options)
    _require_ending(options)
    _require_files(options)
    _require_output(options)
    _require_extras(options)


def _require_files(options: Any) -> None:
    hints = get_type_hints(type(options), include_extras=True)
    for one in fields(options):
        marks = [mark for mark in _marks(hints[one.name]) if isinstance(mark, Existing)]
        given = getattr(options, one.name)
        for path in given if isinstance(given, tuple) else (given,):
            # A sum of a base and adapters is taken apart later.
            if not marks or path is None or "+" in str(path) or Path(path).exists():
                continue
            if marks[0] is not CHECKPOINT:
                raise FileNotFoundError(marks[0].sentence.format(path=repr(str(path)), name=Path(path).name))
            if split_entry(str(path))[1] is None and find_cached(str(path)) is None:
                raise FileNotFoundError(say_absent(str(path)))
    for name in ("model", "data", "train", "statistics"):
        text = getattr(options, name, None)
        place, colon, _ = (text or "").rpartition(":")
        if name != "model" and text and text.endswith((".npz", ".safetensors")) and not Path(text).is_file():
            raise UsageError(f"there is no data file {text!r}")
        if colon and place.endswith(".py") and not Path(place).is_file():
            raise UsageError(f"{'MODEL' if name == 'model' else 'DATA'} {text!r}: there is no file {place!r}")


def _require_ending(options: Any) -> None:
    path = getattr(options, "output", None)
    if path is None:
        return
    for mark in _marks(get_type_hints(type(options), include_extras=True)["output"]):
        if isinstance(mark, Endings):
            require_suffix(path, mark.suffixes)


def _require_output(options: Any) -> None:
    """Raise an error if the output is an existing file. A folder may contain the files of an interrupted run."""
    path, is_free = getattr(options, "output", None), any(getattr(options, n, True) for n in ("overwrite", "dry_run"))
    if path is not None and not is_free and not getattr(options, "resume", False) and Path(path).is_file():
        raise FileExistsError(f"the output {str(path)!r} exists already; choose another name, or give --overwrite")


def _require_extras(options: Any) -> None:
    model = getattr(options, "model", None)
    if model and (Path(model) / "config.json").is_file() and find_spec("transformers") is None:
        raise ImportError(f"{TRANSFORMERS}: pip install 'regauge[transformers]'")
    if getattr(options, "format", None) == "hdf5" and find_spec("h5py") is None:
        raise ImportError(f"{HDF5}: pip install 'regauge[hdf5]'")
    if str(getattr(options, "on", "")).startswith(("dask", "tcp:")) and find_spec("distributed") is None:
        raise ImportError(f"{DASK}: pip install 'regauge[dask]'")


def _marks(hint: Any) -> Iterator[Any]:
    """Yield the annotations of a type, at any depth."""
    for one in (*getattr(hint, "__metadata__", ()), *getattr(hint, "__args__", ())):
        yield one
        if not isinstance(one, type):
            yield from _marks(one)
    origin = getattr(hint, "__origin__", None)
    if origin is not None and not isinstance(origin, type):
        yield from _marks(origin)
