"""Checkpoints under the names of their MODEL, which is a factory, a folder, or a checkpoint that says what it holds."""

import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.checkpoint_names import find_cached
from regauge.checkpoints.formats.adapters import adapter_symmetry
from regauge.checkpoints.formats.state_dicts import has_names, match, shorten
from regauge.checkpoints.names.extra import share_extra
from regauge.checkpoints.names.from_transformers import expected_of, name_by, name_for
from regauge.checkpoints.names.prefixes import unwrap
from regauge.checkpoints.writing import SUFFIX
from regauge.cli.compare_options import Compare
from regauge.cli.every_expert import visit_every_expert
from regauge.cli.example_inputs import with_masks
from regauge.cli.gauge_options import Audit, Gauge
from regauge.cli.options import Canonicalize, ExampleInputs, Matching, UsageError
from regauge.cli.output import show_status, tell
from regauge.cli.prune_options import Prune
from regauge.cli.tracing import Traced, name_once, trace_once
from regauge.cli.transformers_models import Values, build_folder, unreached_parts
from regauge.cli.user_code import users_code
from regauge.core.params import Params

DESCRIBED = {"regauge.inr": "regauge.cli.inr_networks"}
"""Kinds of networks of which checkpoints say in their header that they hold one, and the module that builds them.

Each has `build`, from a checkpoint to a module and example inputs, and `find_task`, for data of that kind.
"""


@dataclass(frozen=True)
class Model:
    """A module in evaluation mode, its example inputs, and the checkpoint that says which network it is, if any.

    `further` are keyword inputs that are traced instead if the first cannot be, or do not reach every part; `lack` says
    why there are no inputs.
    """

    module: nn.Module
    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    further: Iterable[Mapping[str, Any]] = ()
    lack: str = ""

    @property
    def is_meta(self) -> bool:
        """Whether the module has no values."""
        return any(tensor.is_meta for tensor in self.module.state_dict().values())


@dataclass(frozen=True)
class Networks:
    """Checkpoints of one architecture, their symmetry with every size known, and their model where it is known.

    Checkpoints in memory have the names of the model.
    """

    checkpoints: tuple[Checkpoint, ...]
    symmetry: rg.Symmetry
    model: Model | None


Outputs = Callable[[Any], Any] | Sequence[str] | None
"""The outputs of a model that must not change; all unless given."""
Named: TypeAlias = tuple[Checkpoint, Mapping[str, Tensor] | None]
"""A checkpoint under the names of its model, and the tensors that it must have, if they are known."""


def read_networks(
    options: Matching | Canonicalize | Compare | Gauge | Audit | Prune,
    paths: Sequence[Path | Checkpoint],
    *,
    values: Values = "if small",
    is_streamed: bool = False,
    traced: Traced | None = None,
) -> Networks:
    """Read checkpoints of one architecture, or their headers if they are streamed, and find their symmetry.

    It is known already where the model was `traced`.
    """
    checkpoints = [Checkpoint.open(path) for path in paths]
    name = name_model(options.model, checkpoints[0]) if options.symmetry is None else options.model
    is_adapter = checkpoints[0].is_adapter and name is None
    if name is None and options.symmetry is None and not is_adapter:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    values = "never" if is_streamed else values
    found = None if options.symmetry is None else read_symmetry(options.symmetry)
    if found is None and is_adapter:
        found = adapter_symmetry(checkpoints[0].on_meta())
    built, state, module = None, None, None
    if name is not None and (found is not None or values == "always"):
        built = load_model(name, options.inputs, values=values)
        state, module = built.module.state_dict(), built.module
    if found is None:
        assert name is not None
        traced = trace_model(name, options.inputs, values=values, built=built) if traced is None else traced
        found, state, module = traced.symmetry, traced.state, traced.module
    if name is None or state is None:
        named: Sequence[Named] = [(name_by(one, found), None) for one in checkpoints]
    else:
        checkpoints = [unwrap(one, state.keys()) for one in checkpoints]
        named = _under_names(checkpoints, state, module, name, options.inputs)
    views = share_extra([one for one, _ in named])
    named = [(view, own) for view, (_, own) in zip(views, named, strict=True)]
    if is_streamed:
        checkpoints = [one for one, _ in named]
        match(checkpoints[0].on_meta(), named[0][1] or checkpoints[0].on_meta(), checkpoints[0].label)
    else:
        with show_status("reading the checkpoints"):
            checkpoints = [one.with_params(match(one.params, own or one.params, one.label)) for one, own in named]
    for other in [] if is_streamed else checkpoints[1:]:
        match(other.on_meta(), checkpoints[0].on_meta(), other.label, checkpoints[0].label)
    return Networks(tuple(checkpoints), found.bind(checkpoints[0].on_meta()), built)


def _under_names(
    checkpoints: Sequence[Checkpoint], state: Params, module: nn.Module | None, name: str, inputs: ExampleInputs
) -> Sequence[Named]:
    """Checkpoints under the names of the model that `name` names, which is built if it is needed and not there."""
    if all(has_names(one.on_meta(), state) for one in checkpoints):
        return [(one, state) for one in checkpoints]
    owner = cache(lambda: load_module(name, values="never").module if module is None else module)

    def find(checkpoint: Checkpoint) -> tuple[Checkpoint, Mapping[str, Tensor]]:
        named = name_for(checkpoint, owner())
        return named, expected_of(owner(), named)

    return [name_once(name, inputs, one, state, partial(find, one)) for one in checkpoints]


def trace_model(
    text: str, options: ExampleInputs, *, values: Values, verify: bool | None = None, built: Model | None = None
) -> Traced:
    """The symmetry and the tensors of the model that `text` names; `built` is that model where it was built already."""

    def trace() -> Traced:
        model = load_model(text, options, values=values) if built is None else built
        is_verified = verify and not model.is_meta
        with show_status("tracing the model" + (" and verifying what is found" if is_verified else "")):
            symmetry = find_symmetry(model, options, verify=is_verified)
        return Traced(symmetry, model.module.state_dict(), model.is_meta, module=model.module)

    found = trace_once(text, options, [values, verify], trace)
    if found.is_known:
        tell(f"the symmetry of {text} is known from an earlier run (--retrace finds it anew)")
    return found


def find_symmetry(model: Model, options: ExampleInputs, *, verify: bool | None = None) -> rg.Symmetry:
    """The symmetry of a model whose outputs were chosen on the command line."""
    return find_traced(model, options, verify=verify)[0]


def find_traced(
    model: Model, options: ExampleInputs, *, verify: bool | None = None
) -> tuple[rg.Symmetry, Mapping[str, Any] | None]:
    """The symmetry of a model, and the keyword inputs on which it was found; from now on these can be traced.

    Of several example inputs those count that reach all models that it consists of, or else embeddings: with these,
    what unreached parts write is an input, which stays as it is.
    """
    first: Exception | None = None
    for kwargs in itertools.chain([model.kwargs], model.further):
        try:
            found, kwargs = _find_on(model, kwargs, options, verify)
        except (rg.TraceError, ValueError) as error:
            first = first or error
            continue
        unreached = unreached_parts(model.module, found)
        if not unreached:
            return found, kwargs
        if "inputs_embeds" in (kwargs or {}):
            tell(f"{shorten(unreached)} cannot be traced with the rest, and stay as they are, as do the embeddings")
            return found, kwargs
        first = first or UsageError(
            f"no example inputs are known that reach {shorten(unreached)} of {type(model.module).__name__}; write a "
            "factory that returns (module, (), {...})"
        )
    assert first is not None
    raise UsageError(str(first)) from first


def _find_on(
    model: Model, kwargs: Mapping[str, Any] | None, options: ExampleInputs, verify: bool | None
) -> tuple[rg.Symmetry, Mapping[str, Any] | None]:
    """The symmetry on some inputs, with loops over chosen experts made traceable if need be, and the inputs."""

    def find(kwargs: Mapping[str, Any] | None) -> rg.Symmetry:
        return rg.discover(
            model.module,
            model.inputs,
            kwargs,
            outputs=options.outputs or None,
            keep=options.keep,
            move=options.move,
            verify=verify,
        )

    try:
        return find(kwargs), kwargs
    except rg.TraceError as error:
        masked = with_masks(model.module, dict(kwargs or {}))
        if not visit_every_expert(model.module, model.inputs, masked):
            raise
        first = error
    try:
        return find(masked), masked
    except rg.TraceError:
        raise first from None


def read_symmetry(path: Path) -> rg.Symmetry:
    """The symmetry that `regauge discover -o` wrote."""
    if not path.is_file():
        raise UsageError(f"there is no symmetry {str(path)!r}; `regauge discover MODEL -o {path.name}` writes one")
    try:
        return rg.Symmetry.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        reason = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise UsageError(
            f"{str(path)!r} is no symmetry ({reason}); `regauge discover MODEL -o {path.with_suffix('.json').name}` "
            "writes one"
        ) from error


def load_model(text: str, options: ExampleInputs, *, values: Values = "if small") -> Model:
    """Build the model that `text` names, with the example inputs of the options or else its own."""
    with show_status("building the model"):
        model = load_module(text, values=values)
    if options.input_shape:
        model = replace(
            model, inputs=describe_inputs(options, "meta" if model.is_meta else "cpu"), kwargs=None, further=()
        )
    if not model.inputs and not model.kwargs:
        raise UsageError(
            model.lack
            or f"{text!r} gives no example inputs: let the factory return (module, example_inputs), "
            "or describe them, for example --input-shape 2x3x32x32"
        )
    return model


def load_module(text: str, *, values: Values = "if small") -> Model:
    """Build the model that `text` names, which may have no example inputs.

    It is `package.module:factory`, `file.py:factory`, a folder with config.json, or a checkpoint whose header says
    which network it holds.
    """
    folder = find_cached(text) or Path(text)
    if folder.is_dir():
        return _from_folder(folder, values)
    device = torch.device("meta") if values == "never" else nullcontext()
    if text.endswith(SUFFIX):
        checkpoint = Checkpoint.open(text)
        with device:
            module, inputs = described_networks(checkpoint).build(checkpoint, with_values=values != "never")
        return Model(module.eval(), inputs, checkpoint=checkpoint)
    built = call_factory(text, "MODEL", device)
    if isinstance(built, nn.Module):
        return Model(built.eval())
    if isinstance(built, tuple) and len(built) in (2, 3) and isinstance(built[0], nn.Module):
        inputs = built[1] if isinstance(built[1], tuple | list) else (built[1],)
        kwargs = built[2] if len(built) == 3 else None
        return Model(built[0].eval(), tuple(inputs), kwargs)
    raise UsageError(
        f"the factory {text!r} returned a {type(built).__name__}; it must return a torch.nn.Module, "
        "(module, example_inputs) or (module, example_inputs, example_kwargs)"
    )


def call_factory(text: str, what: str, context: AbstractContextManager[Any] | None = None) -> Any:
    """What the factory `package.module:name` or `file.py:name` returns."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(
            f"{what} {text!r} is neither a folder nor a factory; write package.module:factory or file.py:factory, or "
            f"fetch it if it is a model of the Hugging Face hub: hf download {text} --local-dir {Path(text).name}"
        )
    factory = getattr(_module(place, text, what), name, None)
    if not callable(factory):
        raise UsageError(f"{what} {text!r}: {place!r} has no function or class {name!r}")
    with users_code(f"{what} {text!r} failed"), context or nullcontext():
        return factory()


def _module(place: str, text: str, what: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise UsageError(f"{what} {text!r}: there is no file {place!r}")
        name = f"regauge_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{what} {text!r}: {place!r} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        with users_code(f"{what} {text!r} cannot be imported"):
            spec.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    with users_code(f"{what} {text!r} cannot be imported"):
        return importlib.import_module(place)


def describe_inputs(options: ExampleInputs, device: str) -> tuple[Tensor, ...]:
    """Noise of the shapes and dtypes that the user typed."""
    dtypes = options.input_dtype or ("float32",)
    if len(dtypes) == 1:
        dtypes = dtypes * len(options.input_shape)
    if len(dtypes) != len(options.input_shape):
        raise UsageError(
            f"there are {len(options.input_shape)} input shapes but {len(dtypes)} dtypes; give one dtype each, or one"
        )
    generator = torch.Generator().manual_seed(0)
    return tuple(_input(s, d, generator).to(device) for s, d in zip(options.input_shape, dtypes, strict=True))


def _input(shape: str, dtype: str, generator: torch.Generator) -> Tensor:
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise UsageError(f"the input shape {shape!r} cannot be read; write sizes with x between them: 2x3x32x32")
    sizes = [int(size) for size in shape.split("x")]
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or kind.is_complex:
        raise UsageError(f"the input dtype {dtype!r} is unknown; write for example float32 or int64")
    if kind.is_floating_point:
        return torch.randn(sizes, generator=generator).to(kind)
    return torch.randint(0, 2, sizes, generator=generator).to(kind)


def name_model(text: str | None, first: Checkpoint) -> str | None:
    """MODEL, or the first checkpoint where that says itself what it is; None if the model is unknown."""
    if text is not None:
        return text
    is_described = (Path(first.home) / "config.json").is_file() or first.header.get("kind") in DESCRIBED
    return first.home if is_described else None


def described_networks(checkpoint: Checkpoint) -> Any:
    """The module of `DESCRIBED` that knows the network of a checkpoint."""
    kind = checkpoint.header.get("kind", "")
    if kind not in DESCRIBED:
        raise UsageError(
            f"{checkpoint.label!r} does not say what network it holds; name the model as package.module:factory or "
            "file.py:factory, or as a folder with config.json"
        )
    return importlib.import_module(DESCRIBED[kind])


def _from_folder(folder: Path, values: Values) -> Model:
    module, inputs = build_folder(folder, values)
    try:
        return Model(module, (), next(inputs), further=inputs)
    except UsageError as error:
        return Model(module, lack=str(error))
