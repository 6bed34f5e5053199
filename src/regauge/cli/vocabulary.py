"""Networks with different tokens under one vocabulary, as `--tokenizer` and recipes ask for it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from regauge.cli.configs import Configuration
from regauge.cli.options import UsageError
from regauge.merging.recipe import Vocabulary
from regauge.merging.tokens import Retokenized, TokenPlan
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.vocabularies import Difference, has_tokenizer, is_tokenizer, load_tokenizer

TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class United:
    """Networks under one vocabulary.

    Attributes:
        networks: The checkpoints.
        plan: Which rows are taken from where.
        files: The files of the tokenizer that take the place of those of the first network; None for those that go.
        note: What was done, in a sentence.
    """

    networks: tuple[Checkpoint, ...]
    plan: TokenPlan
    files: Mapping[str, bytes | None]
    note: str


def unite(
    networks: Mapping[Path, Checkpoint], wanted: Vocabulary, config: Configuration, *, base: Path | None
) -> United | None:
    """Bring networks under the vocabulary that is wanted; None if they are under it already.

    Args:
        networks: By their folders; the first one's files are those of the result.
        wanted: The vocabulary.
        config: The configuration of the first one; the number of tokens is set in it.
        base: The folder of the base, where there is one.

    Raises:
        UsageError: A network has no tokenizer, or names its embeddings otherwise than its model.
    """
    folders, named = list(networks), config.token_axes()
    axes = dict(named)
    for checkpoint in networks.values():
        there = config.names_in(checkpoint)
        axes |= {own: axis for name, axis in named.items() for own in there.get(name, ())}
    tokenizers = {folder: _tokenizer(one.path.parent) for folder, one in networks.items()}
    rows = {folder: _rows(one, axes) for folder, one in networks.items()}
    known = {
        folder: {token: k for token, k in one.get_vocab().items() if k < rows[folder]}
        for folder, one in tokenizers.items()
    }
    first = folders[0]
    source = first if wanted.source in ("union", "base") else Path(wanted.source)
    place, own = networks[source].path.parent, networks[first].path.parent
    tokenizer = load_tokenizer(place)  # A new one, to which tokens are added.
    added = _added(tokenizer, [tokenizers[folder] for folder in folders], known) if wanted.source == "union" else []
    added += [token for token in wanted.tokens if token not in tokenizer.get_vocab() and token not in added]
    tokenizer.add_tokens(added)
    vocabulary = tokenizer.get_vocab()
    if wanted.source == "base":
        vocabulary = {token: k for token, k in vocabulary.items() if k < rows[first] or token in wanted.tokens}
    size = -(-(max(vocabulary.values()) + 1) // wanted.multiple) * wanted.multiple
    are_alike = not any(Difference.of(known[first], other) for other in known.values())
    is_first = not Difference.of(known[first], vocabulary)
    is_sized = wanted.multiple == 1 or rows[first] == size
    if are_alike and is_first and is_sized and not wanted.tokens and set(rows.values()) == {rows[first]}:
        return None
    plan = TokenPlan.of(
        vocabulary,
        [known[folder] for folder in folders],
        axes,
        base=None if base is None else folders.index(base),
        tokens={
            token: (None if one.model is None else folders.index(one.model), one)
            for token, one in wanted.tokens.items()
        },
        multiple=wanted.multiple,
    )
    config.count_tokens(plan.size)
    files = _files(tokenizer, own, place, is_new=bool(added))
    numbers = {k: token for token, k in known[first].items()}
    if not is_first:
        files |= config.renumber(lambda k: vocabulary.get(numbers.get(k, "")))
    moved = tuple(Retokenized(one, axes, rows) for one, rows in zip(networks.values(), plan.own, strict=True))
    taken = ", ".join(f"{int(own.sum())} of {folder}" for folder, own in zip(folders, plan.taken, strict=True))
    note = f"vocabulary: {len(vocabulary)} tokens in {plan.size} rows; rows taken from other networks: {taken}"
    return United(moved, plan, files, note)


def choose_template(wanted: str, folders: Sequence[Path]) -> str | None:
    """The chat template that is wanted: this one, or for "auto" the most common one of some folders."""
    if wanted != "auto":
        return wanted
    found = [template for folder in folders if (template := _template(folder))]
    return Counter(found).most_common(1)[0][0] if found else None


def template_files(template: str, files: Mapping[str, bytes | None], folder: Path) -> dict[str, bytes | None]:
    """The files of a chat template, for a folder that takes over those of another one but `files`."""
    result: dict[str, bytes | None] = {TEMPLATE: template.encode(), "chat_template.json": None}
    name = "tokenizer_config.json"
    content = files.get(name) if name in files else (folder / name).read_bytes() if (folder / name).is_file() else None
    if content is not None:
        settings = json.loads(content)
        settings.pop("chat_template", None)
        result[name] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return result


def _template(folder: Path) -> str | None:
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8").strip()
    path = folder / "tokenizer_config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None
    return found.strip() if isinstance(found, str) else None


def _tokenizer(folder: Path) -> Any:
    if not has_tokenizer(folder):
        raise UsageError(f"{str(folder)!r} has no tokenizer, so that its tokens are unknown; put its files there")
    return load_tokenizer(folder)


def _rows(checkpoint: Checkpoint, axes: Mapping[str, int]) -> int:
    """How many rows the embeddings of a network have."""
    sizes = {checkpoint.stored[name].shape[axis] for name, axis in axes.items() if name in checkpoint.stored}
    if len(sizes) != 1:
        what = f"have {sorted(sizes)} rows" if sizes else f"are not under the names of its model ({', '.join(axes)})"
        raise UsageError(f"the embeddings and heads of {checkpoint.label} {what}; save it with transformers again")
    return int(sizes.pop())


def _added(tokenizer: Any, others: Sequence[Any], known: Mapping[Path, Mapping[str, int]]) -> list[Any]:
    """Tokens that are added for a union: of the other networks in their order, special ones with their settings."""
    have = set(tokenizer.get_vocab())
    plain: dict[str, Any] = {}
    special: dict[str, Any] = {}
    for other, tokens in zip(others, known.values(), strict=True):
        settings = {one.content: one for one in other.added_tokens_decoder.values()}
        for token in sorted(tokens, key=tokens.__getitem__):
            if token not in have:
                target = special if token in settings else plain
                target.setdefault(token, settings.get(token, token))
    return [*plain.values(), *(one for token, one in special.items() if token not in plain)]


def _files(tokenizer: Any, first: Path, source: Path, *, is_new: bool) -> dict[str, bytes | None]:
    """The files of a tokenizer, and None for those of the first network that it does not have."""
    if not is_new and source == first:
        return {}
    with TemporaryDirectory() as name:
        if is_new:
            tokenizer.save_pretrained(name)
        own = Path(name) if is_new else source
        found = {
            path.name: path.read_bytes() for path in own.iterdir() if is_tokenizer(path.name) or path.name == TEMPLATE
        }
    gone = [path.name for path in first.iterdir() if is_tokenizer(path.name) and path.name not in found]
    return {**dict.fromkeys(gone), **found}
