"""A recipe: what is merged, how, and by which numbers, as a mergekit YAML file says it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from regauge.hub.tokens import Vocabulary


@dataclass(frozen=True)
class Parameter:
    """A number that may differ from tensor to tensor.

    Attributes:
        choices: Pieces of names with one number, or a gradient over the depth. The first piece that occurs in the name
            of a tensor counts; None stands for every name.
        line: The line in the recipe.
    """

    choices: tuple[tuple[str | None, tuple[float, ...]], ...]
    line: int

    def at(self, name: str, depth: float) -> float | None:
        """Return the number for a tensor at a depth in [0, 1], or None if it says nothing about that name."""
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
    """A model that takes part, or a range of its layers.

    Attributes:
        model: Its folder, or BASE+ADAPTER.
        layers: The first layer and the one after the last; None for all.
        parameters: Its own numbers.
        line: The line in the recipe.
    """

    model: Path
    layers: tuple[int, int] | None
    parameters: Parameters
    line: int


@dataclass(frozen=True)
class Slice:
    """Layers of the result, one after the other, and what each is made of: one layer of every source.

    Attributes:
        sources: The layers that take part.
        parameters: Numbers for all of them.
        stack: A part of the name of the stack that the layers are of, such as "encoder", where a model has several.
        base: The base of these layers; that of the recipe by default.
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
        method: The merge method, as mergekit calls it.
        slices: One without ranges of layers where whole models are merged.
        base: The folder of the base.
        parameters: Numbers for all models.
        dtype: The dtype of the result; that of the base or the first model by default.
        vocabulary: None if all models must have the same one.
        chat_template: A Jinja template, or "auto" for the most common one of the models; the base's by default.
        align: Whether models are aligned; "auto" if it is needed.
        notes: Sentences about settings of the recipe that change nothing here.
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
        """Every model once: the base first where there is one, then in the order of the recipe."""
        named = [source.model for part in self.slices for source in part.sources]
        named += [part.base for part in self.slices if part.base is not None]
        tokens = {} if self.vocabulary is None else self.vocabulary.tokens
        named += [one.model for one in tokens.values() if one.model is not None]
        if self.vocabulary is not None and isinstance(self.vocabulary.source, Path):
            named.append(self.vocabulary.source)
        return tuple(dict.fromkeys([*([] if self.base is None else [self.base]), *named]))

    @property
    def is_whole(self) -> bool:
        """Whether whole models are merged, not slices of them."""
        return all(part.stack is None and one.layers is None for part in self.slices for one in part.sources)

    @property
    def stacks(self) -> dict[str | None, tuple[Slice, ...]]:
        """The slices of each stack of layers."""
        names = dict.fromkeys(part.stack for part in self.slices)
        return {name: tuple(part for part in self.slices if part.stack == name) for name in names}

    def number(self, name: str, part: Slice, source: Source | None, tensor: str, depth: float) -> float | None:
        """Return the number of a parameter at a tensor: that of the source, else of its slice, else of the whole
        recipe."""
        for parameters in ({} if source is None else source.parameters, part.parameters, self.parameters):
            found = parameters[name].at(tensor, depth) if name in parameters else None
            if found is not None:
                return found
        return None
