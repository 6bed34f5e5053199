"""Unification of the vocabularies of several networks."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.plain_files import parse_object, read_inside, read_object, read_text
from regauge.checkpoints.writing import SUFFIX
from regauge.hub.configuration import CONFIG, Configuration
from regauge.hub.tokenizers import (
    TEMPLATE,
    Difference,
    compare_tokens,
    has_tokenizer,
    is_tokenizer,
    load_tokenizer,
    note_files,
    tokenizer_files,
)
from regauge.hub.tokens import Retokenized, TokenPlan, Vocabulary

LOG = logging.getLogger("regauge.hub")
UNION = "`tokenizer=union`"
"""The argument that unifies vocabularies, for messages."""
PADDING = 1 << 16
"""The largest number of embedding rows without a token that a network may have."""


@dataclass(frozen=True)
class United:
    """Networks that were converted to one vocabulary.

    Attributes:
        networks: The checkpoints.
        plan: The sources of the rows; None if no network is changed.
        files: New contents for files that are copied to the output; None for files that are left out.
        note: A message about the changes.
    """

    networks: tuple[Checkpoint, ...]
    plan: TokenPlan | None = None
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    note: str = ""

    def require_place(self, out: Path) -> None:
        """Raise a ValueError if tokenizer files must be written but the output is a single file."""
        if self.files and out.suffix == SUFFIX:
            raise ValueError(
                "the tokenizer of the result is written to a folder: give a folder as the output, or with "
                "`tokenizer=FOLDER` the tokens of the network whose files are copied"
            )


def bring_together(
    checkpoints: Sequence[Checkpoint],
    source: int = 0,
    *,
    tokenizer: str | None = None,
    remedy: str = "",
    is_shared: bool = False,
) -> United:
    """Convert networks to the requested vocabulary. If only the order of tokens differs, the result has the order of
    the first network.

    Differences in other files and settings are logged.

    Args:
        checkpoints: Networks in folders or files. Only folders have tokenizers.
        source: The index of the checkpoint whose files are copied to the output.
        tokenizer: "union" (all tokens), "base" (the tokens of the first network), or the path of one of the folders.
        remedy: Advice for the error about different tokens.
        is_shared: Whether to drop tokens that some networks lack. By default, tokens that some networks lack cause an
            error.

    Raises:
        ValueError: Tokens differ and no vocabulary was chosen. A network has no tokenizer, or its embeddings have
            different names in the file and in the model.
    """
    first, networks = checkpoints[0].label, tuple(checkpoints)
    differences = {} if tokenizer is not None else compare_tokens(checkpoints)
    for label, one in differences.items():
        if not (one.is_order or is_shared):
            raise ValueError(
                f"the tokens of {first} and {label} differ: {one.explain(first, label)}; "
                f"{remedy or 'give checkpoints with one vocabulary'}"
            )
    united = [one.label for one in networks] if tokenizer is not None else [*differences]
    for note in note_files(networks, source, united=united):
        LOG.info(note)
    if tokenizer is None and not differences:
        return United(networks)
    folders = [Path(one.label) for one in networks]
    is_shared = is_shared and not all(one.is_order for one in differences.values())
    own = Vocabulary("shared" if is_shared else "base")
    wanted = own if tokenizer is None else Vocabulary(read_choice(tokenizer, folders))
    config = Configuration(networks[source].path.parent)
    found = unite(networks, wanted, config, base=None, source=source)
    if found is None:
        LOG.info("all networks have the same vocabulary")
        return United(networks)
    if is_shared:
        clauses = (f"{one.explain(first, label)}" for label, one in differences.items())
        found = replace(found, note=f"only tokens that all networks have are compared: {'; '.join(clauses)}")
    elif differences:
        moved = ", ".join(f"{len(one.moved)} of {label}" for label, one in differences.items())
        found = replace(found, note=f"tokens were reordered to their ids in {first}: {moved}")
    LOG.info(found.note)
    return found


@contextmanager
def model_with(model: str | None, united: United) -> Iterator[str | None]:
    """Yield the name of the model. If no name is given and tokens changed, yield a folder with the new
    configuration.
    """
    content = united.files.get(CONFIG)
    if model is not None or content is None:
        yield model
        return
    with TemporaryDirectory() as name:
        (Path(name) / CONFIG).write_bytes(content)
        yield name


def read_choice(text: str, folders: Sequence[Path]) -> Any:
    """Read the choice of a vocabulary: "union", "base", or one of the folders.

    Raises:
        ValueError: The choice is invalid, or a network is not a folder.
    """
    files = [str(folder) for folder in folders if not Path(str(folder).partition("+")[0]).is_dir()]
    if files:
        raise ValueError(f"`tokenizer=` needs folders with a tokenizer, but {files[0]!r} is a file; leave it out")
    if text in ("union", "base"):
        return text
    if Path(text) not in folders:
        raise ValueError(f"`tokenizer=` is {text!r}; there is union, base (the first one), or one of the folders")
    return Path(text)


def unite(
    networks: Sequence[Checkpoint], wanted: Vocabulary, config: Configuration, *, base: int | None, source: int = 0
) -> United | None:
    """Convert networks to the requested vocabulary. Return None if the networks already have this vocabulary.

    Args:
        networks: The networks. Paths in `wanted` are the labels of networks.
        wanted: The requested vocabulary.
        config: The configuration of the checkpoint whose files are copied to the output. The function changes the
            number of tokens in the configuration.
        base: The index of the base; None without a base.
        source: The index of the checkpoint whose files are copied to the output.

    Raises:
        ValueError: A network has no tokenizer, or its embeddings have different names in the file and in the model.
    """
    folders, named = [Path(one.label) for one in networks], config.token_axes()
    places = [one.path.parent for one in networks]
    axes = dict(named)
    for checkpoint in networks:
        there = config.names_in(checkpoint)
        axes |= {own: axis for name, axis in named.items() for own in there.get(name, ())}
    tokenizers, rows = [_tokenizer(place) for place in places], [_rows(one, axes) for one in networks]
    known = [
        {token: k for token, k in one.get_vocab().items() if k < count}
        for one, count in zip(tokenizers, rows, strict=True)
    ]
    giver = 0 if isinstance(wanted.source, str) else folders.index(wanted.source)
    place = places[giver]
    tokenizer = load_tokenizer(place)  # a new tokenizer, to which tokens are added
    added = _added(tokenizer, tokenizers, known) if wanted.source == "union" else []
    added += [token for token in wanted.tokens if token not in tokenizer.get_vocab() and token not in added]
    tokenizer.add_tokens(added)
    vocabulary = tokenizer.get_vocab()
    if wanted.source == "shared":
        in_order = sorted(known[0], key=known[0].__getitem__)
        shared = [token for token in in_order if all(token in own for own in known)]
        vocabulary = {token: k for k, token in enumerate(shared)}
        if not shared:
            raise ValueError(
                f"{' and '.join(map(str, folders))} have no token in common; give networks with common tokens"
            )
    elif wanted.source != "union":
        vocabulary = {token: k for token, k in vocabulary.items() if k < rows[giver] or token in wanted.tokens}
    size = -(-(max(vocabulary.values()) + 1) // wanted.multiple) * wanted.multiple
    stored = " and ".join(f"{count:,}" for count in rows)
    if size > 2 * (sum(rows) + len(vocabulary)) + PADDING:  # before memory is allocated for rows
        raise ValueError(
            f"the tokens of {folders[giver]} would need {size:,} rows of embeddings, but there are {len(vocabulary):,} "
            f"tokens, and networks with {stored} rows; correct the tokenizers, or the multiple to which rows are added"
        )
    is_plain = wanted.multiple == 1 and not wanted.tokens
    are_alike = not any(Difference.of(known[0], other) for other in known)
    is_own = not Difference.of(known[source], vocabulary)
    if are_alike and is_own and set(rows) == {rows[0]} and (is_plain or (not wanted.tokens and rows[0] == size)):
        return None
    is_order = is_plain and all(one.keys() == vocabulary.keys() and _is_one_to_one(one) for one in (*known, vocabulary))
    plan = TokenPlan.of(
        vocabulary,
        known,
        axes,
        base=base,
        tokens={
            token: (None if one.model is None else folders.index(one.model), one)
            for token, one in wanted.tokens.items()
        },
        multiple=wanted.multiple,
        kept=rows[0] if is_order and set(rows) == {rows[0]} else None,
    )
    files = _files(tokenizer, places[source], place, is_new=bool(added))
    numbers = {k: token for token, k in known[source].items()}
    if not is_own:
        files |= config.renumber(lambda k: vocabulary.get(numbers.get(k, "")))
    if not is_own or plan.size != rows[source]:
        config.count_tokens(plan.size)
        files[CONFIG] = config.content
    vocabularies = dict.fromkeys(path for folder in places for path in tokenizer_files(folder))
    moved: tuple[Checkpoint, ...] = tuple(
        Retokenized(one, axes, own, [*vocabularies]) for one, own in zip(networks, plan.own, strict=True)
    )
    moved = tuple(one.replacing(files) if k == source else one for k, one in enumerate(moved))
    taken = ", ".join(f"{int(own.sum())} of {folder}" for folder, own in zip(folders, plan.taken, strict=True))
    note = f"vocabulary: {len(vocabulary)} tokens in {plan.size} rows; rows taken from other networks: {taken}"
    return United(moved, plan, files, note)


def choose_template(wanted: str, folders: Sequence[Path]) -> str | None:
    """Return the requested chat template. For "auto", return the most common template of the folders."""
    if wanted != "auto":
        return wanted
    found = [template for folder in folders if (template := _template(folder))]
    return Counter(found).most_common(1)[0][0] if found else None


def template_files(template: str, files: Mapping[str, bytes | None], folder: Path) -> dict[str, bytes | None]:
    """Return the files that store a chat template in an output. All other files of the output are copied, except for
    `files`.
    """
    result: dict[str, bytes | None] = {TEMPLATE: template.encode(), "chat_template.json": None}
    name = "tokenizer_config.json"
    content = files.get(name) if name in files else read_inside(folder / name) if (folder / name).is_file() else None
    if content is not None:
        settings = parse_object(content, folder / name)
        settings.pop("chat_template", None)
        result[name] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return result


def _template(folder: Path) -> str | None:
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE).strip()
    path = folder / "tokenizer_config.json"
    found = read_object(path).get("chat_template") if path.is_file() else None
    return found.strip() if isinstance(found, str) else None


def _tokenizer(folder: Path) -> Any:
    if not has_tokenizer(folder):
        raise ValueError(
            f"{str(folder)!r} has no tokenizer, and its tokens are unknown; put the files of the tokenizer there"
        )
    return load_tokenizer(folder)


def _rows(checkpoint: Checkpoint, axes: Mapping[str, int]) -> int:
    """Return the number of rows of the embeddings and heads of a network."""
    sizes = {checkpoint.stored[name].shape[axis] for name, axis in axes.items() if name in checkpoint.stored}
    if len(sizes) != 1:
        what = f"have {sorted(sizes)} rows" if sizes else f"are not under the names of its model ({', '.join(axes)})"
        raise ValueError(f"the embeddings and heads of {checkpoint.label} {what}; save it with transformers again")
    return int(sizes.pop())


def _is_one_to_one(vocabulary: Mapping[str, int]) -> bool:
    return len({*vocabulary.values()}) == len(vocabulary)


def _added(tokenizer: Any, others: Sequence[Any], known: Sequence[Mapping[str, int]]) -> list[Any]:
    """Return the tokens that a union adds, in the order of the networks. Special tokens keep their settings."""
    have = set(tokenizer.get_vocab())
    plain: dict[str, Any] = {}
    special: dict[str, Any] = {}
    for other, tokens in zip(others, known, strict=True):
        settings = {one.content: one for one in other.added_tokens_decoder.values()}
        for token in sorted(tokens, key=tokens.__getitem__):
            if token not in have:
                target = special if token in settings else plain
                target.setdefault(token, settings.get(token, token))
    return [*plain.values(), *(one for token, one in special.items() if token not in plain)]


def _files(tokenizer: Any, first: Path, source: Path, *, is_new: bool) -> dict[str, bytes | None]:
    """Return the files of a tokenizer. Files that only the first network has map to None."""
    if not is_new and source == first:
        return {}
    with TemporaryDirectory() as name:
        if is_new:
            tokenizer.save_pretrained(name)
        own = Path(name) if is_new else source
        found = {
            path.name: read_inside(path) for path in own.iterdir() if is_tokenizer(path.name) or path.name == TEMPLATE
        }
    gone = [path.name for path in first.iterdir() if is_tokenizer(path.name) and path.name not in found]
    return {**dict.fromkeys(gone), **found}
