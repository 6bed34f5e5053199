"""The configuration of a merged network, whose numbers of layers and tokens may differ from its sources."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.names.converted import Converted
from regauge.checkpoints.names.from_transformers import name_for
from regauge.checkpoints.names.transformers_models import CODE, REMOTE
from regauge.checkpoints.plain_files import read_object
from regauge.core.params import Params
from regauge.hub.folder_model import build_folder
from regauge.hub.layer_stack import LayerStack
from regauge.hub.tokenizers import holds_tokens

CONFIG = "config.json"
GENERATION = "generation_config.json"


class Configuration:
    """An editor of a config.json, or of the text section of a config.json if the network has several submodels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            from transformers import AutoConfig

            self._config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.document: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (ImportError, ValueError, KeyError, OSError) as error:
            reason = CODE if REMOTE in str(error) else " ".join(str(error).split())
            raise ValueError(
                f"{str(folder / CONFIG)!r} is needed for the numbers of layers and tokens of the result, but is no "
                f"configuration that transformers knows: {reason}"
            ) from error
        self._text = self._config.get_text_config()
        inside = [name for name in self._config.sub_configs if getattr(self._config, name, None) is self._text]
        self._part = self.document.get(inside[0], {}) if inside else self.document

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self._count("num_hidden_layers", "layers")

    @property
    def tokens(self) -> int:
        """The number of rows of the embeddings."""
        return self._count("vocab_size", "tokens")

    def keep_layers(self, kept: Sequence[int], stack: str | None = None) -> None:
        """Select some of the layers: change the number of layers and all settings with one entry per layer.

        Args:
            kept: The indices of the selected layers, in their new order.
            stack: A substring of the layer stack's name, if a network has several stacks.

        Raises:
            ValueError: No setting equals the number of layers.
        """
        if stack is None:
            count, part = self.layers, self._part
            key = type(self._text).attribute_map.get("num_hidden_layers", "num_hidden_layers")
        else:
            count, (*place, key) = self._find_count(stack)
            part = _part_at(self.document, place)
        _keep(part, key, count, kept)

    def _find_count(self, stack: str) -> tuple[int, tuple[str, ...]]:
        """Return the number of layers of a stack, and the path of the setting that gives the length of this stack
        alone.
        """
        settings, names = self._config.to_dict(), list(self.build())
        layers = LayerStack.of(names, str(self.folder), stack)
        count = layers.count
        places = sorted(_places(settings, count), key=lambda place: "layer" not in place[-1])
        for place in places:  # A default may depend on another setting.
            if "layer" in place[-1]:
                _part_at(self.document, place[:-1]).setdefault(place[-1], count)
        for place in places:
            larger = copy.copy(self)
            larger.document = copy.deepcopy(self.document)
            _keep(_part_at(larger.document, place[:-1]), place[-1], count, [*range(count), count - 1])
            try:
                found = list(larger.build())
            except (ValueError, RuntimeError):  # a number that cannot be changed separately
                continue
            new = [name for name in found if name not in names]
            if new and all((own := layers.split(name)) is not None and own[0] == count for name in new):
                return count, place
        raise ValueError(
            f"no single setting of {str(self.folder / CONFIG)!r} gives the number of layers of "
            f"{layers.prefix.removesuffix('.')}, so another number cannot be written; keep the number of layers"
        )

    def count_tokens(self, count: int) -> None:
        """Set the number of rows of the embeddings."""
        self._set("vocab_size", count)

    def renumber(self, number: Callable[[int], int | None]) -> dict[str, bytes | None]:
        """Replace the token ids in configurations by new ids, and drop the ids of removed tokens.

        Returns:
            The edited generation configuration, if the folder has a generation configuration.
        """
        _renumber(self.document, number)
        path = self.folder / GENERATION
        if not path.is_file():
            return {}
        document = read_object(path)
        _renumber(document, number)
        return {GENERATION: _encode(document)}

    @property
    def content(self) -> bytes:
        """The content of the edited config.json in bytes."""
        return _encode(self.document)

    @contextmanager
    def as_folder(self) -> Iterator[Path]:
        """Yield a temporary folder that contains only the edited config.json."""
        with TemporaryDirectory() as name:
            (Path(name) / CONFIG).write_bytes(self.content)
            yield Path(name)

    @property
    def module(self) -> nn.Module:
        """The model of the edited configuration, uninitialized."""
        with self.as_folder() as folder:
            try:
                return build_folder(folder, "never")[0]
            except ValueError as error:  # which names the temporary folder
                raise ValueError(str(error).replace(str(folder), str(self.folder))) from error

    def build(self) -> Params:
        """Return the tensors of the configured model, uninitialized."""
        return self.module.state_dict()

    def names_in(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        """Return the model's tensors in order, each with the names of the file tensors that contain it."""
        module = self.module
        view, names = name_for(checkpoint, module), list(module.state_dict())
        if not isinstance(view, Converted):
            return {name: (name,) for name in names}
        renamed, made = view.conversion.renamed, view.conversion.made
        there = {name: (renamed[name],) if name in renamed else () for name in names}
        return there | {name: tuple(dict.fromkeys(box.source for box in boxes)) for name, boxes in made.items()}

    def token_axes(self) -> dict[str, int]:
        """Return the token axis of every tensor of the model that has a token axis.

        To find the token axis, the method builds the model with one additional token. The axis that becomes longer is
        the token axis.
        """
        larger = copy.copy(self)
        larger.document = copy.deepcopy(self.document)
        larger._part = larger.document if self._part is self.document else _same_part(self, larger)
        larger.count_tokens(self.tokens + 1)
        before, after = self.build(), larger.build()
        axes = {}
        for name, tensor in before.items():
            differing = [k for k, (n, m) in enumerate(zip(tensor.shape, after[name].shape, strict=True)) if n != m]
            if differing:
                axes[name] = differing[0]
        if not axes:
            raise ValueError(
                f"no tensor of the model of {str(self.folder)!r} has an axis of tokens; give a language model, or "
                "leave tokens out"
            )
        return axes

    def _count(self, name: str, what: str) -> int:
        found = getattr(self._text, name, None)
        if not isinstance(found, int):
            raise ValueError(
                f"{str(self.folder / CONFIG)!r} does not set the number of {what} ({name!r}); add it there"
            )
        return found

    def _set(self, name: str, value: int) -> None:
        self._part[type(self._text).attribute_map.get(name, name)] = value


def _places(settings: Mapping[str, Any], count: int, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all settings that equal a given number, including nested settings."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _places(value, count, (*place, key))
        elif value == count and isinstance(value, int) and not isinstance(value, bool):
            yield (*place, key)


def _part_at(document: dict[str, Any], place: Sequence[str]) -> dict[str, Any]:
    for key in place:
        if not isinstance(document.get(key), dict):
            document[key] = {}
        document = document[key]
    return document


def _keep(part: dict[str, Any], key: str, count: int, kept: Sequence[int]) -> None:
    """Select some layers in a section of a configuration: shorten all lists with one entry per layer, and update the
    setting `key`, the number of layers.
    """
    for name, value in part.items():
        if "layer" in name and isinstance(value, list) and len(value) == count:
            part[name] = [value[k] if k < count else value[-1] for k in kept]
    part[key] = len(kept)


def _same_part(one: Configuration, other: Configuration) -> dict[str, Any]:
    found: dict[str, Any] = next(other.document[key] for key, value in one.document.items() if value is one._part)
    return found


def _renumber(document: dict[str, Any], number: Callable[[int], int | None]) -> None:
    for key, value in list(document.items()):
        if key.endswith("forced_decoder_ids") and isinstance(value, list):  # pairs of a position and a token
            pairs = [
                (pair[0], _renumbered(pair[1], number)) for pair in value if isinstance(pair, list) and len(pair) == 2
            ]
            document[key] = [list(pair) for pair in pairs if pair[1] is not None]
        elif holds_tokens(key) and value is not None:
            document[key] = _renumbered(value, number)
        elif isinstance(value, dict):
            _renumber(value, number)


def _renumbered(value: Any, number: Callable[[int], int | None]) -> Any:
    """Return the new id of a token, or a list or dictionary of new ids without removed tokens."""
    if isinstance(value, list):
        return [new for old in value if (new := _renumbered(old, number)) not in (None, [])]
    if isinstance(value, dict):
        return {key: new for key, old in value.items() if (new := _renumbered(old, number)) is not None}
    return number(value) if isinstance(value, int) and value >= 0 else value


def _encode(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
