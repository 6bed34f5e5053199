"""The content of a YAML file in mergekit's format: the models, the merge method, and the parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from regauge.hub.tokens import Vocabulary


@dataclass(frozen=True)
class Parameter:
    """A number that may differ between tensors.

    Attributes:
        choices: Substrings of names, each with one number or with a gradient over the depth. The first substring that
            occurs in a tensor's name applies; None applies to every name.
        line: The line number in the recipe.
    """

    choices: tuple[tuple[str | None, tuple[float, ...]], ...]
    line: int

    def at(self, name: str, depth: float) -> float | None:
        """Return the number for a tensor at a depth in [0, 1], or None if no choice applies to the name."""
        values = next((own for piece, own in self.choices if piece is None or piece in name), None)
        if values is None:
            return None
        position = depth * (len(values) - 1)
        first = min(int(position), len(values) - 1)
        second, share = min(first + 1, len(values) - 1), position - first
        return (1 - share) * values[first] + share * values[second] if share else values[first]


Parameters = Mapping[str, Parameter]


@dataclass(frozen=True)
class Source:
    """A model that is merged, or a range of its layers.

    Attributes:
        model: The folder of the model, or BASE+ADAPTER.
        layers: The index of the first layer, and one more than the index of the last layer; None for all layers.
        parameters: The parameters of this model.
        line: The line number in the recipe.
    """

    model: Path
    layers: tuple[int, int] | None
    parameters: Parameters
    line: int


@dataclass(frozen=True)
class Slice:
    """Consecutive layers of the result. Each layer is computed from one layer of every source.

    Attributes:
        sources: The layers that are merged.
        parameters: Parameters for all sources.
        stack: A substring of the stack's name, such as "encoder", if a model has several stacks.
        base: The base of the slice; by default the base of the recipe.
    """

    sources: tuple[Source, ...]
    parameters: Parameters = field(default_factory=dict)
    stack: str | None = None
    base: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """The content of a recipe: method, models, base and settings.

    Attributes:
        path: The file of the recipe.
        method: The merge method, under its name in mergekit.
        slices: The slices. For a merge of whole models, there is one slice without layer ranges.
        base: The folder of the base.
        parameters: Parameters for all models.
        dtype: The dtype of the result; None if the recipe does not set it.
        vocabulary: The tokens of the result; None if all models must have the same tokens.
        chat_template: A Jinja template, or "auto" for the most common template of the models. By default, the base's
            template.
        align: Whether models are aligned; "auto" aligns them only if alignment is needed.
        notes: Notes about settings of the recipe that have no effect in regauge.
    """

    path: Path
    method: str
    slices: tuple[Slice, ...]
    base: Path | None
    parameters: Parameters
    dtype: str | None
    vocabulary: Vocabulary | None
    chat_template: str | None
    align: bool | Literal["auto"]
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[Path, ...]:
        """Every model once: the base first, if there is one, then the other models in the recipe's order."""
        named = [source.model for part in self.slices for source in part.sources]
        named += [part.base for part in self.slices if part.base is not None]
        tokens = {} if self.vocabulary is None else self.vocabulary.tokens
        named += [one.model for one in tokens.values() if one.model is not None]
        if self.vocabulary is not None and isinstance(self.vocabulary.source, Path):
            named.append(self.vocabulary.source)
        return tuple(dict.fromkeys([*([] if self.base is None else [self.base]), *named]))

    @property
    def is_whole(self) -> bool:
        """Whether whole models are merged instead of slices of models."""
        return all(part.stack is None and one.layers is None for part in self.slices for one in part.sources)

    @property
    def stacks(self) -> dict[str | None, tuple[Slice, ...]]:
        """The slices of each stack of layers."""
        names = dict.fromkeys(part.stack for part in self.slices)
        return {name: tuple(part for part in self.slices if part.stack == name) for name in names}

    def number(self, name: str, part: Slice, source: Source | None, tensor: str, depth: float) -> float | None:
        """Return a parameter for a tensor, as set by the source, else by the slice, else by the recipe."""
        for parameters in ({} if source is None else source.parameters, part.parameters, self.parameters):
            found = parameters[name].at(tensor, depth) if name in parameters else None
            if found is not None:
                return found
        return None
