"""Places of checkpoints by the names that users give; this module does not import torch.

A name is the path of a file, of an index of shards or of a folder; or it is `FILE:NAME`, one of the networks in a file,
or `BASE+ADAPTER`. `org/model` is a model of the Hugging Face hub: it is read from the cache of that hub on this machine
where it lies there, and nothing is fetched.
"""

import os
import re
from pathlib import Path

from regauge.checkpoints.formats.file_formats import CHUNKS, METADATA, every_format, weight_suffixes
from regauge.checkpoints.plain_files import read_json
from regauge.core.counted import shorten

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""The files of an adapter in a folder of PEFT's format."""
MANIFEST = "store.json"
"""The file that makes a folder a store of a population, which is no checkpoint."""
ALIGNMENT = ".alignment.safetensors"
"""The ending of stored alignments."""
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
"""Names of files that processes wrote, one or more each, with the safetensors writer of torch."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Names of models of the hub."""
ADDRESS = re.compile(r"[a-z0-9]{2,}:/", re.IGNORECASE)
"""The beginning of addresses as paths, in which slashes are single."""
COMMIT = re.compile(r"[0-9a-f]{7,64}")
CACHES = (
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)
"""Variables of the environment that say where the cache of the hub is, with the folder in what they name."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def folder_files() -> tuple[str, ...]:
    """Return names of files for which a folder is searched, in this order, before an adapter is looked for."""
    return tuple(name for one in every_format().values() for name in one.names)


def locate(path: str | Path) -> Path:
    """Return the file that holds a checkpoint, or the index of its shards; for a folder, the file that is read.

    A model of the hub is looked up in the cache; see `find_cached`.
    """
    path = find_cached(str(path)) or Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.exists():
        raise FileNotFoundError(say_absent(str(path)))
    return path


def files_of(file: Path) -> list[Path]:
    """Return all files of weights of a checkpoint, by the one that `locate` finds, which is the first.

    Raises:
        FileNotFoundError, ValueError: It is an index, and is damaged or names files that are not there.
    """
    beside: list[Path] = []
    if file.name.endswith(".index.json"):
        beside = [file.parent / name for name in dict.fromkeys(shards_of(file).values())]
    elif file.name == METADATA:
        beside = sorted(file.parent.glob(f"*{CHUNKS}"))
    elif SHARD.fullmatch(file.name):
        beside = sorted(path for path in file.parent.iterdir() if SHARD.fullmatch(path.name) and path != file)
    return [file, *beside]


def shards_of(index: Path) -> dict[str, str]:
    """Return the file that holds each parameter, by the index of a sharded checkpoint.

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
            "to files; fetch it again"
        ) from error
    if not shards:
        raise ValueError(f"{str(index)!r} names no tensors; it was cut off, or is of an empty network: fetch it again")
    strange = [shard for shard in shards if not _is_name(shard)]
    if strange:
        raise ValueError(
            f"{str(index)!r} names shards outside its own folder ({shorten(strange)}); they are not read: move them "
            "into it"
        )
    absent = [shard for shard in shards if (index.parent / shard).is_dir() or not (index.parent / shard).exists()]
    if absent:
        raise FileNotFoundError(
            f"{str(index)!r} names shards that are not there: {shorten(absent)} "
            f"({len(absent)} of {len(shards)}); put them next to it"
        )
    return files


def _is_name(shard: object) -> bool:
    """Return whether it can be the name of a file of weights next to an index."""
    if not isinstance(shard, str) or "\0" in shard:
        return False
    return Path(shard).name == shard and shard.endswith(weight_suffixes(is_read=True))


def split_sum(path: str) -> tuple[str, str] | None:
    """Return a base and the folder of an adapter where a path that is not there is `BASE+ADAPTER`."""
    base, plus, folder = path.rpartition("+")
    if not plus or Path(path).exists() or not Path(folder).is_dir():
        return None
    if not is_adapter(Path(folder)):
        raise ValueError(
            f"{folder!r} is no adapter: it lacks {ADAPTER_CONFIG}; write BASE+ADAPTER with a folder of PEFT's format"
        )
    return base, folder


def split_entry(path: str) -> tuple[str, str | None]:
    """Return a file and the network in it where a path that is not there is `FILE:NAME`; else the path."""
    if Path(path).exists():
        return path, None
    for place in (k for k, letter in enumerate(path[:-1]) if letter == ":"):
        file = Path(path[:place])
        if (file.name.endswith(weight_suffixes(has_entries=True)) and file.is_file()) or (file / METADATA).is_file():
            return path[:place], path[place + 1 :]
    return path, None


def find_cached(name: str) -> Path | None:
    """Return the folder of a model of the hub in the cache on this machine, as of its branch `main`; None without one.

    What is a path of something is no such name.
    """
    if not HUB_NAME.fullmatch(name) or os.path.lexists(name):
        return None
    folder = _cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def is_address(text: str) -> bool:
    """Return whether a text begins as an address does, such as https://."""
    return ADDRESS.match(text) is not None


def say_absent(path: str) -> str:
    """Return an error text: there is no checkpoint at a path, and how to fetch one where it may be the name of a
    model."""
    if is_address(path):
        return f"{path!r} is an address, and regauge fetches nothing: download the checkpoint, and name the file"
    text = f"there is no checkpoint {path!r}; check the path"
    if not HUB_NAME.fullmatch(path) or "/" not in path or path.endswith((".json", *weight_suffixes(is_read=True))):
        return text
    return (
        f"{text}, or if it is a model of the Hugging Face hub, fetch it, since regauge does not: "
        f"hf download {path} --local-dir {path.partition('/')[2]}"
    )


def _cache() -> Path:
    """Return the folder of the hub's cache."""
    for variable, inside in CACHES:
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / inside
    return Path.home() / ".cache/huggingface/hub"


def _in_folder(folder: Path) -> Path:
    for name in (*folder_files(), *ADAPTER_FILES):
        if (folder / name).exists():
            return folder / name
    for pattern in (pattern for one in every_format().values() for pattern in one.alone):
        found = [file for file in sorted(folder.glob(pattern)) if not file.name.endswith(ALIGNMENT)]
        if len(found) == 1 or (found and all(SHARD.fullmatch(file.name) for file in found)):
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
        f"the folder {str(folder)!r} holds no checkpoint ({', '.join(folder_files())} or one other .safetensors file); "
        "name the file, or the folder that holds it"
    )
