"""A reader of recipes in mergekit's YAML format. Errors name the key and the line of an unknown entry."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from regauge.checkpoints.location import find_cached, say_absent
from regauge.checkpoints.yaml_files import REFUSED, compose_yaml
from regauge.hub.chat_templates import TEMPLATES
from regauge.hub.tokens import TokenSource, Vocabulary
from regauge.merging.recipes.recipe import Parameter, Parameters, Recipe, Slice, Source
from regauge.merging.recipes.recipe_methods import IDLE, METHODS, NORMS, SINGLE, RecipeMethod

KEYS = (
    "merge_method",
    "models",
    "slices",
    "modules",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer",
    "tokenizer_source",
    "chat_template",
    "regauge",
)
DTYPES = ("float16", "bfloat16", "float32", "float64")
MOST_LAYERS = 20_000
"""The largest number of layers in a model."""
SHARES = ("density", "gamma", "select_topk")
"""Parameters that are shares of the entries of a tensor."""


class RecipeError(ValueError):
    """An error in a recipe, with its file and line."""


@dataclass(frozen=True)
class Entry:
    """A value in a recipe, with its file, key and line."""

    path: Path
    key: str
    node: yaml.Node

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def refuse(self, message: str) -> RecipeError:
        return RecipeError(f"{self.path}, line {self.line}: {message}")

    @property
    def value(self) -> Any:
        """The value of a scalar entry."""
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.refuse(f"{self.key!r} holds {_kind(self.node)}, but must be one value")
        try:
            return yaml.constructor.SafeConstructor().construct_object(self.node)
        except REFUSED as error:
            raise self.refuse(f"{self.key!r} has a value that cannot be read: {error}") from error

    @property
    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.refuse(f"{self.key!r} is {self.value!r}, but must be a text")
        return str(self.value)

    @property
    def number(self) -> float:
        """The entry as a number. Yes and no become one and zero, and strings such as 1e-3 are also read as numbers."""
        try:
            found = float(self.value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise self.refuse(f"{self.key!r} is {self.value!r}, but must be a finite number")
        return found

    @property
    def whole(self) -> int:
        if self.number != int(self.number):
            raise self.refuse(f"{self.key!r} is {self.value!r}, but must be a whole number")
        return int(self.number)

    @property
    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.refuse(f"{self.key!r} is {self.value!r}, but must be true or false")
        return bool(self.value)

    @property
    def items(self) -> "list[Entry]":
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            raise self.refuse(f"{self.key!r} holds {_kind(self.node)}, but must be a list with one entry at least")
        return [Entry(self.path, self.key, node) for node in self.node.value]

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_list(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    def mapping(self, known: Iterable[str] | None = None, needed: Iterable[str] = ()) -> "dict[str, Entry]":
        """Return the entries of a mapping by key; raise an error for unknown, repeated and missing keys."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.refuse(f"{self.key!r} holds {_kind(self.node)}, but must hold keys and values")
        found: dict[str, Entry] = {}
        for key, value in self.node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key)
            place = Entry(self.path, name, key)
            if known is not None and name not in known:
                raise place.refuse(f"{name!r} is unknown in {self.key}; choose from {', '.join(known)}")
            if name in found:
                raise place.refuse(f"{name!r} occurs twice; remove one")
            found[name] = Entry(self.path, name, value)
        absent = [name for name in needed if name not in found]
        if absent:
            raise self.refuse(f"{self.key} lacks {absent[0]!r}")
        return found


def read_recipe(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        FileNotFoundError: The file does not exist.
        RecipeError: The file is not a recipe, or an entry is unknown or invalid.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe {str(path)!r}; give a YAML file as mergekit reads it")
    try:
        node = compose_yaml(path)
    except ValueError as error:
        raise RecipeError(f"{error}; give a YAML file as mergekit reads it") from error
    if node is None:
        raise RecipeError(f"{str(path)!r} is empty; give a YAML file as mergekit reads it")
    return _recipe(Entry(path, "the recipe", node))


def _recipe(whole: Entry) -> Recipe:
    """Return the recipe that the entries of a file describe."""
    top = whole.mapping(KEYS, ["merge_method"])
    name = top["merge_method"].text
    if name not in METHODS:
        raise top["merge_method"].refuse(f"the merge method {name!r} is unknown; choose from {', '.join(METHODS)}")
    method = METHODS[name]
    if sum(key in top for key in ("models", "slices", "modules")) != 1:
        raise whole.refuse("a recipe has one of 'models', 'slices' and 'modules'; write one of them")
    if "tokenizer" in top and "tokenizer_source" in top:
        raise top["tokenizer_source"].refuse("'tokenizer_source' and 'tokenizer' mean the same; leave one of them out")
    base = read_folder(top["base_model"]) if "base_model" in top else None
    if "models" in top:
        slices: tuple[Slice, ...] = (
            Slice(tuple(_source(one, method, name) for one in top["models"].items), base=base),
        )
    elif "slices" in top:
        slices = tuple(_slice(one, method, name, base) for one in top["slices"].items)
    else:
        modules = top["modules"].mapping()
        slices = tuple(part for stack, entry in modules.items() for part in _module(stack, entry, method, name, base))
        if not slices:
            raise top["modules"].refuse("'modules' is empty; name a stack of layers, such as encoder")
    if method.base in ("none", "member"):
        slices = tuple(_with_base(part) for part in slices)
    if (
        sum(one.layers[1] - one.layers[0] for part in slices for one in part.sources if one.layers is not None)
        > MOST_LAYERS
    ):
        raise whole.refuse(f"the slices name more than {MOST_LAYERS:,} layers; name fewer")
    parameters = _parameters(top.get("parameters"), method, name)
    recipe = Recipe(
        path=whole.path,
        method=name,
        slices=slices,
        base=base,
        parameters=parameters,
        dtype=read_dtype(top.get("out_dtype", top.get("dtype"))),
        vocabulary=_vocabulary(top),
        chat_template=_template(top.get("chat_template")),
        align=_align(top.get("regauge")),
        notes=tuple(_notes(top, name, slices, parameters)),
    )
    _require_models(recipe, method, whole)
    return recipe


def _with_base(part: Slice) -> Slice:
    """Return a slice of whole models. As in mergekit, the base is added if it is not among the models."""
    sources = part.sources
    if part.base is None or any(source.layers is not None or source.model == part.base for source in sources):
        return part
    return replace(part, sources=(*sources, Source(part.base, None, {}, sources[0].line)))


def _require_models(recipe: Recipe, method: RecipeMethod, whole: Entry) -> None:
    """Raise an error for too few or too many models, a missing base, missing parameters, and inconsistent slices."""
    for part in recipe.slices:
        if part.base is None and method.base in ("needed", "member"):
            raise whole.refuse(f"the method {recipe.method} needs a 'base_model'")
        models = [source.model for source in part.sources]
        line = f"{recipe.path}, line {part.sources[0].line}"
        if recipe.method in SINGLE and len(models) == 1 and part.sources[0].layers is not None:
            continue
        if len(set(models)) < len(models) and method.most > 1:
            raise RecipeError(f"{line}: a model occurs twice; name each model once, with the sum of its weights")
        if method.base == "member" and part.base not in models:
            raise RecipeError(f"{line}: the base of {recipe.method} is one of its two models; name it among them")
        if method.base in ("needed", "optional"):
            models = [model for model in models if model != part.base]
        if not method.least <= len(models) <= method.most:
            wanted = f"{method.least}" if method.least == method.most else f"at least {method.least}"
            wanted = f"at most {method.most:g}" if len(models) > method.most else wanted
            of_base = " (the base is one, too)" if part.base in models else ""
            wanted += " model" if method.most == 1 else " models"
            raise RecipeError(f"{line}: {recipe.method} combines {wanted} here, but there are {len(models)}{of_base}")
        lengths = {source.layers[1] - source.layers[0] for source in part.sources if source.layers is not None}
        if len(lengths) > 1:
            raise RecipeError(f"{line}: the sources of a slice have {sorted(lengths)} layers; give all as many")
        is_lacking = part.base not in [source.model for source in part.sources]
        if is_lacking and method.base in ("needed", "member") and lengths:
            raise RecipeError(f"{line}: the slice lacks the base {part.base}; add it with the range of its layers")
        own = [source for source in part.sources if source.model != part.base or method.base in ("none", "member")]
        for key, default in method.own.items():
            missing = default is None and key not in recipe.parameters and key not in part.parameters
            lacking = next((source for source in own if key not in source.parameters), None)
            if missing and lacking is not None:
                of_base = " (the base is one, too)" if lacking.model == part.base else ""
                raise RecipeError(
                    f"{recipe.path}, line {lacking.line}: {recipe.method} needs {key!r} for every model{of_base}; give "
                    "it in its parameters, or in those of the recipe"
                )
        for key, default in method.common.items():
            if default is None and key not in recipe.parameters and key not in part.parameters:
                raise RecipeError(f"{line}: {recipe.method} needs the parameter {key!r}")


def _module(stack: str, entry: Entry, method: RecipeMethod, name: str, base: Path | None) -> Iterable[Slice]:
    """Yield the slices of a layer stack, or one slice with all layers of the stack.

    Parameters of the stack apply if a slice does not set them. In a model with a single stack, the stack has the name
    "default", as in mergekit.
    """
    found = entry.mapping(("slices", "models", "parameters"))
    if ("slices" in found) == ("models" in found):
        raise entry.refuse(f"the module {stack!r} has either 'slices' or 'models'; write one of them")
    parameters, own = _parameters(found.get("parameters"), method, name), None if stack == "default" else stack
    if "models" in found:
        yield Slice(tuple(_source(one, method, name) for one in found["models"].items), parameters, own, base)
        return
    for one in found["slices"].items:
        part = _slice(one, method, name, base)
        yield replace(part, parameters={**parameters, **part.parameters}, stack=own)


def _slice(entry: Entry, method: RecipeMethod, name: str, base: Path | None) -> Slice:
    found = entry.mapping(("sources", "parameters", "base_model", "residual_weight"), ["sources"])
    sources = tuple(_source(one, method, name, is_slice=True) for one in found["sources"].items)
    own = read_folder(found["base_model"]) if "base_model" in found else base
    parameters = dict(_parameters(found.get("parameters"), method, name))
    if "residual_weight" in found:
        parameters["residual_weight"] = Parameter(((None, (found["residual_weight"].number,)),), entry.line)
    return Slice(sources, parameters, base=own)


def _source(entry: Entry, method: RecipeMethod, name: str, *, is_slice: bool = False) -> Source:
    known = ("model", "layer_range", "parameters") if is_slice else ("model", "parameters")
    found = entry.mapping(known, known[:-1])
    layers = None
    if is_slice:
        ends = [one.number for one in found["layer_range"].items]
        if len(ends) != 2 or not all(end == int(end) for end in ends) or not 0 <= ends[0] < ends[1] <= MOST_LAYERS:
            raise found["layer_range"].refuse(
                f"'layer_range' is {ends}, but must be the first layer and the one after the last, such as [0, 8]"
            )
        layers = (int(ends[0]), int(ends[1]))
    return Source(
        read_folder(found["model"]), layers, _parameters(found.get("parameters"), method, name, is_own=True), entry.line
    )


def read_folder(entry: Entry) -> Path:
    """Return the folder of a model, relative to the recipe's folder; for an entry with `lora`, BASE+ADAPTER."""
    if entry.is_mapping:
        inner = entry.mapping(("model", "lora", "path"))
        if "path" in inner or "model" not in inner:
            if inner.keys() != {"path"}:
                raise entry.refuse(f"{entry.key!r} must be the folder of a model")
            return read_folder(inner["path"])
        base = read_folder(inner["model"])
        return Path(f"{base}+{read_folder(inner['lora'])}") if "lora" in inner else base
    text = entry.text
    try:
        folder = entry.path.parent / Path(text).expanduser()
        parts = [entry.path.parent / Path(part).expanduser() for part in text.split("+")]
    except RuntimeError as error:  # there is no such user
        raise entry.refuse(f"{text!r} is no folder: {error}") from error
    cached = find_cached(text)
    if folder.is_dir() or cached is not None:
        return folder if folder.is_dir() or cached is None else cached
    if len(parts) > 1 and all(part.is_dir() for part in parts):  # a base and its adapters
        return Path("+".join(map(str, parts)))
    if Path(text).is_dir():
        seen = os.path.relpath(text, entry.path.parent)
        raise entry.refuse(f"there is no folder {str(folder)!r}, as folders are relative to the recipe: write {seen!r}")
    raise entry.refuse(f"{say_absent(text)}; give folders relative to the recipe")


def _parameters(entry: Entry | None, method: RecipeMethod, name: str, *, is_own: bool = False) -> Parameters:
    if entry is None:
        return {}
    known = tuple(dict.fromkeys([*method.own, *([] if is_own else method.common)]))
    found = {}
    for key, value in entry.mapping().items():
        is_misplaced = is_own and key in method.common and key not in known
        if is_misplaced or not any(key in one.parameters for one in METHODS.values()):
            place = "a model's parameters" if is_misplaced else f"the parameters of {name}"
            there = f"; there can be {', '.join(known)}" if known else ", which takes none here"
            raise value.refuse(f"{key!r} is unknown in {place}{there}")
        choices = [(None, (_norm(value),))] if key == "rescale_norm" else _choices(value)
        found[key] = Parameter(tuple(choices), value.line)
        is_share = key in known and key in SHARES
        outside = [x for _, values in found[key].choices for x in values if is_share and not 0 <= x <= 1]
        if outside:
            raise value.refuse(f"{key!r} is {outside[0]:g}, but must be a share, from 0 to 1")
    return found


def _norm(entry: Entry) -> float:
    if entry.value not in NORMS:
        raise entry.refuse(f"'rescale_norm' is {entry.value!r}; there are {', '.join(NORMS)}")
    return NORMS[entry.value]


def _choices(entry: Entry) -> Iterable[tuple[str | None, tuple[float, ...]]]:
    """Yield the values of a parameter, each with a substring of tensor names to which it applies, or None for all."""
    if entry.is_mapping:
        yield _conditional(entry)
    elif not entry.is_list:
        yield None, (entry.number,)
    elif any(one.is_mapping for one in entry.items):
        for one in entry.items:
            yield _conditional(one)
    else:
        yield None, tuple(one.number for one in entry.items)


def _conditional(entry: Entry) -> tuple[str | None, tuple[float, ...]]:
    found = entry.mapping(("filter", "value"), ["value"])
    value = found["value"]
    numbers = tuple(one.number for one in value.items) if value.is_list else (value.number,)
    piece = found["filter"].value if "filter" in found else None
    return (None if piece in (None, "*") else str(piece)), numbers


def read_dtype(entry: Entry | None) -> str | None:
    if entry is None or entry.value is None:
        return None
    if entry.value not in DTYPES:
        raise entry.refuse(f"{entry.key!r} is {entry.value!r}; there are {', '.join(DTYPES)}")
    return str(entry.value)


def _vocabulary(top: Mapping[str, Entry]) -> Vocabulary | None:
    if "tokenizer_source" in top:
        return Vocabulary(_token_source(top["tokenizer_source"]))
    if "tokenizer" not in top:
        return None
    found = top["tokenizer"].mapping(("source", "tokens", "pad_to_multiple_of"))
    multiple = 1
    if "pad_to_multiple_of" in found and found["pad_to_multiple_of"].value is not None:
        multiple = found["pad_to_multiple_of"].whole
        if multiple < 1:
            raise found["pad_to_multiple_of"].refuse(f"'pad_to_multiple_of' is {multiple}, but must be positive")
    tokens = found["tokens"].mapping() if "tokens" in found else {}
    source: Any = _token_source(found["source"]) if "source" in found else "union"
    return Vocabulary(source, {token: _token(entry) for token, entry in tokens.items()}, multiple)


def _token_source(entry: Entry) -> Any:
    return entry.value if not entry.is_mapping and entry.value in ("union", "base") else read_folder(entry)


def _token(entry: Entry) -> TokenSource:
    found = entry.mapping(("source", "force"), ["source"])
    is_forced, source = found["force"].flag if "force" in found else False, found["source"]
    if not source.is_mapping or "kind" not in source.mapping():
        return TokenSource(read_folder(source), is_forced=is_forced)
    inner = source.mapping(("kind", "model", "token", "token_id"))
    kind = inner["kind"].value
    if kind == "zero" and len(inner) == 1:
        return TokenSource(None, is_forced=is_forced)
    if kind != "model_token" or "model" not in inner or ("token" in inner) == ("token_id" in inner):
        raise source.refuse("the source of a token is a model, {kind: zero}, or {kind: model_token} with 'model' and "
                            "either 'token' or 'token_id'")  # fmt: skip
    token = inner["token"].text if "token" in inner else None
    number = inner["token_id"].whole if "token_id" in inner else None
    return TokenSource(read_folder(inner["model"]), token, number, is_forced)


def _template(entry: Entry | None) -> str | None:
    if entry is None or entry.value is None:
        return None
    if entry.text not in ("auto", *TEMPLATES) and "{" not in entry.text:
        known = ", ".join(("auto", *TEMPLATES))
        raise entry.refuse(f"'chat_template' is {entry.text!r}; there can be {known}, or the text of a Jinja template")
    return TEMPLATES.get(entry.text, entry.text)


def _align(entry: Entry | None) -> Any:
    found = {} if entry is None else entry.mapping(("align",))
    if "align" not in found:
        return "auto"
    if found["align"].value not in (True, False, "auto"):
        raise found["align"].refuse(f"'align' is {found['align'].value!r}, but must be auto, true or false")
    return found["align"].value


def _notes(top: Mapping[str, Entry], name: str, slices: Iterable[Slice], parameters: Parameters) -> Iterable[str]:
    """Yield notes about settings of the recipe that have no effect."""
    given: dict[str, set[float]] = {}
    everywhere = [parameters, *(part.parameters for part in slices)]
    everywhere += [source.parameters for part in slices for source in part.sources]
    for key, one in (pair for some in everywhere for pair in some.items()):
        given.setdefault(key, set()).update(x for _, values in one.choices for x in values)
    taken = METHODS[name].parameters
    for key in given:
        if key in IDLE and (key in taken or key == "residual_weight"):
            yield IDLE[key]
        elif key not in taken:
            yield f"{key} changes nothing: {name} takes {', '.join(taken) or 'no parameters'}"
    if any(given.get("nuslerp_row_wise", ())) and all(given.get("nuslerp_flatten", ())) and name == "nuslerp":
        yield "nuslerp_row_wise changes nothing: a tensor has one angle unless nuslerp_flatten is false"
    if name == "task_arithmetic" and any(given.get("rescale", ())):
        yield "rescale changes nothing: task_arithmetic drops no entries"
    if "dtype" in top and "out_dtype" in top:
        yield "dtype changes nothing where out_dtype is given: sums are taken in float32 or float64"


def _kind(node: yaml.Node) -> str:
    names = {yaml.ScalarNode: "one value", yaml.SequenceNode: "a list", yaml.MappingNode: "keys and values"}
    return next((name for kind, name in names.items() if isinstance(node, kind)), "something else")
