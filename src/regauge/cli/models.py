"""Checkpoints under the names of their MODEL, which is a factory, a folder, or a checkpoint that says what it holds."""

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.cli.options import Canonicalize, ExampleInputs, Matching, UsageError
from regauge.cli.output import show_status
from regauge.cli.tracing import Traced, trace_once
from regauge.core.params import require_same_shapes
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.state_dicts import match
from regauge.storage.checkpoints.vocabularies import require_same_tokens
from regauge.storage.checkpoints.writing import SUFFIX

MATERIALIZED = 150_000_000
"""A folder's model with more parameters than this is built on the meta device, without values."""
DESCRIBED = {"regauge.inr": "regauge.cli.inr_networks"}
"""Kinds of networks of which checkpoints say in their header that they hold one, and the module that builds them.

Each has `build`, from a checkpoint to a module and example inputs, and `find_task`, for data of that kind.
"""
TOKENS = 8
"""Length of the example sentence of a language model."""


@dataclass(frozen=True)
class Model:
    """A module in evaluation mode, its example inputs, and the checkpoint that says which network it is, if any."""

    module: nn.Module
    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    checkpoint: Checkpoint | None = None

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
Values = Literal["never", "if small", "always"]
"""Whether a model gets values or is built on the meta device: tracing needs none, running needs them all."""


def read_networks(
    options: Matching | Canonicalize,
    paths: Sequence[Path | Checkpoint],
    *,
    values: Values = "if small",
    is_streamed: bool = False,
    source: int = 0,
) -> Networks:
    """Read checkpoints of one architecture, or their headers if they are streamed, and find their symmetry.

    The files beside the weights are taken from the one with the number `source`; what differs there is told.
    """
    checkpoints = [Checkpoint.open(path) for path in paths]
    for note in require_same_tokens(checkpoints, source):
        print(note, file=sys.stderr)
    name = name_model(options.model, checkpoints[0]) if options.symmetry is None else options.model
    if name is None and options.symmetry is None:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    if not is_streamed:
        with show_status("reading the checkpoints"):
            checkpoints = [one.with_params(one.params) for one in checkpoints]
    values = "never" if is_streamed else values
    found = None if options.symmetry is None else read_symmetry(options.symmetry)
    built, state = None, None
    if name is not None and (found is not None or values == "always"):
        built = load_model(name, options.inputs, values=values)
        state = built.module.state_dict()
    if found is None:
        assert name is not None
        traced = trace_model(name, options.inputs, values=values, built=built)
        found, state = traced.symmetry, traced.state
    if state is not None and is_streamed:
        match(checkpoints[0].on_meta(), state, checkpoints[0].label)
    elif state is not None:
        checkpoints = [one.with_params(match(one.params, state, one.label)) for one in checkpoints]
    for other in [] if is_streamed else checkpoints[1:]:
        require_same_shapes(checkpoints[0].params, other.params)
    return Networks(tuple(checkpoints), found.bind(checkpoints[0].on_meta()), built)


def trace_model(
    text: str, options: ExampleInputs, *, values: Values, verify: bool | None = None, built: Model | None = None
) -> Traced:
    """The symmetry and the tensors of the model that `text` names; `built` is that model where it was built already."""

    def trace() -> Traced:
        model = load_model(text, options, values=values) if built is None else built
        is_verified = verify and not model.is_meta
        with show_status("tracing the model" + (" and verifying what is found" if is_verified else "")):
            symmetry = find_symmetry(model, options.outputs, verify=is_verified)
        return Traced(symmetry, model.module.state_dict(), model.is_meta)

    found = trace_once(text, options, [values, verify], trace)
    if found.is_known:
        print(f"the symmetry of {text} is known from an earlier run (--retrace finds it anew)")
    return found


def find_symmetry(model: Model, outputs: Outputs, *, verify: bool | None = None) -> rg.Symmetry:
    """The symmetry of a model whose outputs were chosen on the command line."""
    try:
        return rg.discover(model.module, model.inputs, model.kwargs, outputs=outputs or None, verify=verify)
    except rg.TraceError as error:
        raise UsageError(str(error)) from error


def read_symmetry(path: Path) -> rg.Symmetry:
    """The symmetry that `regauge discover -o` wrote."""
    if not path.is_file():
        raise UsageError(f"there is no symmetry {str(path)!r}; `regauge discover MODEL -o {path.name}` writes one")
    return rg.Symmetry.from_json(path.read_text(encoding="utf-8"))


def load_model(text: str, options: ExampleInputs, *, values: Values = "if small") -> Model:
    """Build the model that `text` names, with the example inputs of the options or else its own."""
    with show_status("building the model"):
        model = load_module(text, values=values)
    if options.input_shape:
        model = replace(model, inputs=describe_inputs(options, "meta" if model.is_meta else "cpu"), kwargs=None)
    if not model.inputs and not model.kwargs:
        raise UsageError(
            f"{text!r} gives no example inputs: let the factory return (module, example_inputs), "
            "or describe them, for example --input-shape 2x3x32x32"
        )
    return model


def load_module(text: str, *, values: Values = "if small") -> Model:
    """Build the model that `text` names, which may have no example inputs.

    It is `package.module:factory`, `file.py:factory`, a folder with config.json, or a checkpoint whose header says
    which network it holds.
    """
    if Path(text).is_dir():
        return _from_folder(Path(text), values)
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
            f"{what} {text!r} is neither a folder nor a factory; write package.module:factory or file.py:factory"
        )
    factory = getattr(_module(place, text, what), name, None)
    if not callable(factory):
        raise UsageError(f"{what} {text!r}: {place!r} has no function or class {name!r}")
    with _users_code(f"{what} {text!r} failed"), context or nullcontext():
        return factory()


@contextmanager
def _users_code(failure: str) -> Iterator[None]:
    """Code that the user wrote: whatever it raises is the user's to mend, so every error is told in a sentence."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{failure}: {type(error).__name__}: {error}") from error


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
        with _users_code(f"{what} {text!r} cannot be imported"):
            spec.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _users_code(f"{what} {text!r} cannot be imported"):
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
    is_described = (Path(first.label) / "config.json").is_file() or first.header.get("kind") in DESCRIBED
    return first.label if is_described else None


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
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"the folder {str(folder)!r} has no config.json, so its model is unknown; name the model as "
            "package.module:factory or file.py:factory"
        )
    try:
        import transformers
    except ImportError as error:
        raise UsageError("a folder with config.json needs transformers: pip install 'regauge[transformers]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{str(folder / 'config.json')!r} is no configuration that transformers knows: {error}"
        ) from error
    names = getattr(config, "architectures", None) or []
    factory = getattr(transformers, names[0], None) if names else None
    if getattr(config, "use_cache", False):
        config.use_cache = False  # It is not part of the function of the weights, and tracing it costs a second export.

    automatic: Any = transformers.AutoModel
    build = partial(factory, config) if factory else partial(automatic.from_config, config)
    with _users_code(f"transformers cannot build the model of {str(folder)!r}"):
        with torch.device("meta"):
            module: nn.Module = build()
        is_small = sum(p.numel() for p in module.parameters()) <= MATERIALIZED
        if values == "always" or (values == "if small" and is_small):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # What the verification says of the symmetry is the same in every run.
                module = build()
    return Model(module.eval(), (), _folder_inputs(module, config))


def _folder_inputs(module: nn.Module, config: Any) -> dict[str, Tensor]:
    """Small inputs for a transformers model, from what its configuration says about them."""
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        vocabulary = _setting(config, "vocab_size", 16)
        return torch.randint(3, max(4, vocabulary), (2, TOKENS), generator=generator).to(device)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    main = getattr(module, "main_input_name", "input_ids")
    kwargs: dict[str, Tensor] = {}
    if main == "pixel_values" or hasattr(config, "vision_config"):
        size = _setting(config, "image_size", 224)
        sides = size if isinstance(size, list | tuple) else (size, size)
        kwargs["pixel_values"] = noise(2, _setting(config, "num_channels", 3), *sides)
    if main == "input_features":
        frames = 2 * _setting(config, "max_source_positions", 1500)
        kwargs["input_features"] = noise(1, _setting(config, "num_mel_bins", 80), frames)
    if main == "input_values":
        kwargs["input_values"] = noise(1, 4000)
    if main == "input_ids":
        kwargs["input_ids"] = tokens()
    if not kwargs:
        raise UsageError(
            f"{type(module).__name__} takes {main!r}, for which no example is known; write a factory that returns "
            "(module, (), {...}), or say --input-shape"
        )
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = tokens()
    return kwargs


def _setting(config: Any, name: str, default: Any) -> Any:
    """A setting of a configuration, or of the configuration of its vision or text part."""
    parts = (config, getattr(config, "vision_config", None), getattr(config, "text_config", None))
    return next((found for part in parts if (found := getattr(part, name, None)) is not None), default)
