"""Comparison of tokenizers. Before a merge, all folders must assign tokens to the same embedding rows.

Tokenizer files assign tokens to embedding rows. If folders assign one token to different rows, the folders' embeddings
cannot be combined entry by entry. If files other than tokenizer files differ, messages list the files, and the folder
from which each file is copied.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.outputs.provenance import DESCRIBING, IN_FOLDER
from regauge.checkpoints.plain_files import read_json, read_object, require_inside
from regauge.core.counted import shorten

TOKENIZER = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "special_tokens_map", "added_tokens")
"""Prefixes of the names of files that define tokens."""
CONFIG = "config.json"
OTHER_FILES = "the folders have different tokenizer files: correct it, or make the files equal"
WITHOUT_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
"""Tokenizer files whose differences do not change the rows of tokens, unless the files add tokens."""
READ_AS_PATHS = ("vocab", "merges", "init_inputs", "gguf_file")
"""Tokenizer settings whose strings transformers opens as file paths, even outside of the folder."""
TEMPLATE = "chat_template.jinja"
NUMBERED = ("_token_id", "_token_ids", "_token_index", "suppress_tokens", "_words_ids", "forced_decoder_ids", "_to_id")
"""Suffixes of settings with token ids: one id, a list, nested lists, or a dictionary of ids."""
HISTORY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Settings of a model that do not affect its computation, or whose effect is visible in the weights."""


@dataclass(frozen=True)
class Difference:
    """The difference between the tokens of two folders.

    Attributes:
        first: The tokens that only the first folder has.
        second: The tokens that only the second folder has.
        moved: Tokens to which the folders assign different rows, each with its two rows.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    moved: tuple[tuple[str, int, int], ...]

    def __bool__(self) -> bool:
        return bool(self.first or self.second or self.moved)

    @property
    def is_order(self) -> bool:
        """Whether the two folders have the same tokens in different rows."""
        return not (self.first or self.second)

    @classmethod
    def of(cls, first: Mapping[str, int], second: Mapping[str, int]) -> "Difference":
        """Compare two vocabularies, which map tokens to rows."""
        both = [token for token in first if token in second]
        return cls(
            tuple(token for token in first if token not in second),
            tuple(token for token in second if token not in first),
            tuple((token, first[token], second[token]) for token in both if first[token] != second[token]),
        )

    def explain(self, first: str, second: str) -> str:
        """Return a clause that describes the difference."""
        parts = []
        for label, tokens in ((first, self.first), (second, self.second)):
            if tokens:
                parts.append(f"{len(tokens)} tokens are only in {label} ({shorten(tokens, 3)})")
        if self.moved:
            examples = ", ".join(f"{token!r} is {a} and {b}" for token, a, b in self.moved[:3])
            more = f" and {len(self.moved) - 3} more" if len(self.moved) > 3 else ""
            parts.append(f"{len(self.moved)} tokens have other ids ({examples}{more})")
        return ", and ".join(parts)


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return every token of a folder's tokenizer with its row, in the order of rows.

    Raises:
        ValueError: The tokenizer cannot be read.
    """
    vocabulary: dict[str, int] = load_tokenizer(folder).get_vocab()
    return dict(sorted(vocabulary.items(), key=lambda item: (item[1], item[0])))


def load_tokenizer(folder: Path, need: str = OTHER_FILES) -> Any:
    """Return the tokenizer of a folder, loaded by transformers. Code in the folder is never run.

    Args:
        folder: The folder.
        need: The reason why the tokenizer is needed and advice, for the message of the error.

    Raises:
        ValueError: The tokenizer cannot be read, or refers to files outside of the folder.
    """
    _require_own_files(folder)
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any error of the tokenizer's reader
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the tokenizer in {str(folder)!r} cannot be read ({type(error).__name__}: {reason}); it is needed because "
            f"{need}"
        ) from error


def _require_own_files(folder: Path) -> None:
    """Raise a ValueError if a tokenizer file is outside of its folder, or refers to a file outside of the folder.

    If a file outside of the folder were read, its lines would become tokens of an output.
    """
    for path in _describing(folder).values():
        require_inside(path)
    for path in (folder / name for name in WITHOUT_TOKENS):
        settings = read_object(path) if path.is_file() else {}
        # Paths in tokenizer_config.json refer to the machine that wrote the file, and are not read.
        are_read = [
            k for k in settings if k in READ_AS_PATHS or (k.endswith("_file") and path.name != WITHOUT_TOKENS[0])
        ]
        for key in [key for key in are_read if settings[key]]:
            raise ValueError(f"{str(path)!r} sets {key!r}, which may name a file outside of its folder; take it out")


def compare_tokens(checkpoints: Sequence[Checkpoint]) -> dict[str, Difference]:
    """Compare each folder's tokens with the first folder's. Return the differences by folder label.

    Args:
        checkpoints: Checkpoints, in folders or single files. Single files have no tokens to compare.

    Raises:
        ValueError: A tokenizer cannot be read.
    """
    folders = _folders(checkpoints)
    if len(folders) < 2:
        return {}
    (_, folder), *others = folders.items()
    found = {}
    for label, other in others:
        names = different_files(folder, other)
        if any(is_tokenizer(name) for name in names) and has_tokenizer(folder) and has_tokenizer(other):
            difference = Difference.of(read_vocabulary(folder), read_vocabulary(other))
            if difference:
                found[label] = difference
    return found


def note_files(checkpoints: Sequence[Checkpoint], source: int, *, united: Collection[str] = ()) -> list[str]:
    """Return messages about files and settings next to the weights that differ from the files and settings of the first
    folder.

    Args:
        checkpoints: Checkpoints, in folders or single files.
        source: The index of the checkpoint whose files are copied to the output.
        united: The labels of checkpoints whose vocabularies are unified. Messages about checkpoints with unified
            vocabularies do not list tokenizer files.
    """
    (first, folder), *others = list(_folders(checkpoints).items()) or [("", Path())]
    notes = []
    for label, other in others:
        names = different_files(folder, other)
        if label in united:
            names = [name for name in names if not (is_tokenizer(name) or name == TEMPLATE)]
        names += _different_settings(folder, other, label in united)
        if names:
            taken = checkpoints[source].label
            notes.append(f"note: {first} and {label} differ in {', '.join(names)}; taken from {taken}")
    return notes


def _folders(checkpoints: Sequence[Checkpoint]) -> dict[str, Path]:
    return {one.label: one.path.parent for one in checkpoints if one.is_folder}


def different_files(first: Path, second: Path) -> list[str]:
    """Return the names of files next to the weights that differ in content or that only one folder has."""
    mine, theirs = _describing(first), _describing(second)
    return [name for name in sorted({*mine, *theirs}) if not _is_same(mine.get(name), theirs.get(name))]


def _different_settings(first: Path, second: Path, is_united: bool) -> list[str]:
    """Return a text that lists the settings in which two models differ, without token settings if `is_united`."""
    if not ((first / CONFIG).is_file() and (second / CONFIG).is_file()):
        return []
    try:
        one, two = (dict(read_json(folder / CONFIG)) for folder in (first, second))
    except (ValueError, TypeError):  # the model builder raises an error
        return []
    keys = [key for key in sorted({*one, *two}) if key not in HISTORY and one.get(key) != two.get(key)]
    keys = [key for key in keys if not (is_united and (key == "vocab_size" or holds_tokens(key)))]
    return [f"{CONFIG} ({', '.join(keys)})"] if keys else []


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files that define tokens."""
    return any(is_tokenizer(name) and name not in WITHOUT_TOKENS for name in _describing(folder))


def is_tokenizer(name: str) -> bool:
    """Return whether a file belongs to a tokenizer."""
    return name.startswith(TOKENIZER)


def holds_tokens(key: str) -> bool:
    """Return whether a setting of a model contains token ids."""
    return key.endswith(NUMBERED)


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a folder that define tokens."""
    return tuple(path for name, path in sorted(_describing(folder).items()) if is_tokenizer(name))


def _describing(folder: Path) -> dict[str, Path]:
    found = (path for path in folder.iterdir() if path.is_file() and path.suffix in DESCRIBING)
    return {
        path.name: path
        for path in found
        if path.name not in (IN_FOLDER, CONFIG) and not path.name.endswith(".index.json") and path.name[0] != "."
    }


def _is_same(first: Path | None, second: Path | None) -> bool:
    """Return whether two files have the same content. JSON files are compared by their parsed values."""
    if first is None or second is None:
        return False
    one, two = first.read_bytes(), second.read_bytes()
    if one == two or first.suffix != ".json":
        return one == two
    try:
        return bool(json.loads(one) == json.loads(two))
    except (ValueError, RecursionError):
        return False
