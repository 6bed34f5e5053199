"""The location of checkpoints: a file, shards with an index, a folder, or the sum of a base and an adapter."""

from pathlib import Path

from regauge.checkpoints.checkpoint_names import find_cached, say_absent
from regauge.checkpoints.formats.file_formats import every_format, weight_suffixes
from regauge.checkpoints.formats.state_dicts import shorten
from regauge.checkpoints.plain_files import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""The files of an adapter in a folder of PEFT's format."""
MANIFEST = "store.json"
"""The file that makes a folder a store of a population, which is no checkpoint."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def folder_files() -> tuple[str, ...]:
    """Names of files for which a folder is searched, in this order, before an adapter is looked for."""
    return tuple(name for one in every_format().values() for name in one.names)


def locate(path: str | Path) -> Path:
    """The file that holds a checkpoint, or the index of its shards; in a folder, the one that is read.

    A model of the hub is looked up in the cache; see `find_cached`.
    """
    path = find_cached(str(path)) or Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.exists():
        raise FileNotFoundError(say_absent(str(path)))
    return path


def shards_of(index: Path) -> dict[str, str]:
    """The file that holds each parameter, by the index of a sharded checkpoint.

    Raises:
        FileNotFoundError: A shard is not there.
        ValueError: It is no index, or it names files outside its own folder.
    """
    try:
        files: dict[str, str] = read_json(index)["weight_map"]
        shards = list(dict.fromkeys(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(index)!r} is not the index of a sharded checkpoint: it lacks a 'weight_map' from parameter names "
            "to files"
        ) from error
    if not shards:
        raise ValueError(f"{str(index)!r} names no tensors; it was cut off, or is of an empty network")
    strange = [shard for shard in shards if not _is_name(shard)]
    if strange:
        raise ValueError(f"{str(index)!r} names shards outside its own folder ({shorten(strange)}); they are not read")
    absent = [shard for shard in shards if (index.parent / shard).is_dir() or not (index.parent / shard).exists()]
    if absent:
        raise FileNotFoundError(
            f"{str(index)!r} names shards that are not there: {shorten(absent)} "
            f"({len(absent)} of {len(shards)}); put them next to it"
        )
    return files


def _is_name(shard: object) -> bool:
    """Whether it can be the name of a file of weights next to an index."""
    if not isinstance(shard, str) or "\0" in shard:
        return False
    return Path(shard).name == shard and shard.endswith(weight_suffixes(is_read=True))


def split_sum(path: str) -> tuple[str, str] | None:
    """A base and the folder of an adapter where a path that is not there is `BASE+ADAPTER`."""
    base, plus, folder = path.rpartition("+")
    if not plus or Path(path).exists() or not Path(folder).is_dir():
        return None
    if not is_adapter(Path(folder)):
        raise ValueError(
            f"{folder!r} is no adapter: it lacks {ADAPTER_CONFIG}; write BASE+ADAPTER with a folder of PEFT's format"
        )
    return base, folder


def _in_folder(folder: Path) -> Path:
    for name in (*folder_files(), *ADAPTER_FILES):
        if (folder / name).exists():
            return folder / name
    for pattern in (pattern for one in every_format().values() for pattern in one.alone):
        found = [file for file in sorted(folder.glob(pattern)) if not file.name.endswith(".alignment.safetensors")]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"the folder {str(folder)!r} holds several checkpoints ({shorten([f.name for f in found])}); name one"
            )

    if (folder / MANIFEST).exists():
        raise FileNotFoundError(
            f"the folder {str(folder)!r} is a store of networks, not a checkpoint; `regauge zoo info {folder}` says "
            f"what it holds, and `regauge zoo export {folder} -o FOLDER` writes files"
        )
    raise FileNotFoundError(
        f"the folder {str(folder)!r} holds no checkpoint ({', '.join(folder_files())} or one other .safetensors file)"
    )
