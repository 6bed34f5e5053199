"""The model of a Hugging Face folder, with inputs on which it can be traced."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regauge.cli.options import UsageError
from regauge.cli.user_code import users_code
from regauge.storage.checkpoints.names.from_transformers import find_factory

MATERIALIZED = 150_000_000
"""A folder's model with more parameters than this is built on the meta device, without values."""
EXPERTS = "batched_mm"
"""Of the ways in which transformers computes experts, the one whose operators and shapes depend on no values."""
TOKENS = 8
"""Length of the example sentence of a language model."""

MASKED = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
"""Masks, and the tokens that they are of."""
MARKS = ("image_token_id", "image_token_index")
"""How configurations name the token in the place of which features of an image are put."""

Values = Literal["never", "if small", "always"]
"""Whether a model gets values or is built on the meta device: tracing needs none, running needs them all."""


def build_folder(folder: Path, values: Values) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a folder with config.json in evaluation mode, and its example inputs."""
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"the folder {str(folder)!r} has no config.json, so its model is unknown; name the model as "
            "package.module:factory or file.py:factory"
        )
    try:
        build = find_factory(folder)
    except ImportError as error:
        raise UsageError("a folder with config.json needs transformers: pip install 'regauge[transformers]'") from error
    with users_code(f"transformers cannot build the model of {str(folder)!r}"):
        with torch.device("meta"):
            module = _traceable(build())
        is_small = sum(p.numel() for p in module.parameters()) <= MATERIALIZED
        if values == "always" or (values == "if small" and is_small):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # What the verification says of the symmetry is the same in every run.
                module = _traceable(build())
    return module.eval(), example_inputs(module, module.config)


def _traceable(module: nn.Module) -> nn.Module:
    """A model whose experts are computed in the way that can be traced; its weights and its function are the same."""
    model: Any = module
    model.set_experts_implementation(EXPERTS)
    return module


def example_inputs(module: nn.Module, config: Any) -> dict[str, Tensor]:
    """Small inputs for a transformers model, from its configuration and what it is known to read.

    Of several that a model might take, images with their text before text alone, those are chosen that it runs on.
    """
    candidates = list(_candidates(module, config))
    for kwargs in candidates[:-1]:
        try:
            with torch.no_grad():
                module(**kwargs)
        except Exception:  # A model can fail in any way on inputs that are not its own.
            continue
        return kwargs
    return candidates[-1]


def with_masks(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with the masks that say that every token counts, for models that do not run without in a trace."""
    known, masks = inspect.signature(module.forward).parameters, {}
    for name, tokens in MASKED.items():
        if name in known and tokens in kwargs:
            masks[name] = torch.ones_like(kwargs[tokens])
    return {**kwargs, **masks}


def _candidates(module: nn.Module, config: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs that a model may take, the ones that reach most of its weights first."""
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    main, known = getattr(module, "main_input_name", "input_ids"), inspect.signature(module.forward).parameters

    def tokens(count: int = TOKENS) -> Tensor:
        vocabulary = _setting(config, "vocab_size", 16)
        return torch.randint(3, max(4, vocabulary), (2, count), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size, channels = _setting(config, "image_size", 224), _setting(config, "num_channels", 3)
    sides = size if isinstance(size, list | tuple) else (size, size)
    bins, positions = _setting(config, "num_mel_bins", 80), _setting(config, "max_source_positions", 1500)
    length, values = _setting(config, "context_length", 32), _setting(config, "num_input_channels", 1)
    makers: dict[str, Callable[[], Tensor]] = {
        "pixel_values": lambda: noise(2, channels, *sides),
        "pixel_values_videos": lambda: noise(2, _setting(config, "num_frames", 4), channels, *sides),
        "input_features": lambda: noise(1, bins, 2 * positions),
        "input_values": lambda: noise(1, 4000),
        "past_values": lambda: noise(2, length, values),
        "input_ids": tokens,
    }
    if main in known and main not in makers:
        raise UsageError(
            f"{type(module).__name__} takes {main!r}, for which no example is known; write a factory that returns "
            "(module, (), {...}), or say --input-shape"
        )
    has_images = hasattr(config, "vision_config") and "pixel_values" in known
    first = ["pixel_values"] * has_images + [main] * (main in known)
    decoder = ["decoder_input_ids"] * (getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in known)
    kwargs = {name: makers[name]().to(device) for name in first} | {name: tokens().to(device) for name in decoder}
    if has_images and "input_ids" in known:
        marked = _marked_tokens(module, config, kwargs["pixel_values"], tokens())
        if marked is not None:
            yield kwargs | {"input_ids": marked.to(device)}
        yield kwargs | {"input_ids": tokens().to(device)}
    yield kwargs
    if has_images and "input_ids" in known:
        yield {"input_ids": tokens().to(device)}


def _marked_tokens(module: nn.Module, config: Any, images: Tensor, text: Tensor) -> Tensor | None:
    """Text behind as many marks as an image has features, for models that put the features in their places."""
    mark = next((v for n in MARKS if (v := getattr(config, n, None)) is not None), None)
    model: Any = module
    if mark is None or not hasattr(module, "get_image_features"):
        return None
    try:
        with torch.no_grad():
            found = model.get_image_features(images)
    except Exception:  # A model can fail in any way on images that it does not take alone.
        return None
    found = getattr(found, "pooler_output", found)
    shapes = [one.shape for one in found] if isinstance(found, list | tuple) else [found.shape[-2:]]
    return torch.cat([torch.full((len(text), shapes[0][-2]), int(mark)), text], 1)


def _setting(config: Any, name: str, default: Any) -> Any:
    """A setting of a configuration, or of the configuration of its vision or text part."""
    parts = (config, getattr(config, "vision_config", None), getattr(config, "text_config", None))
    return next((found for part in parts if (found := getattr(part, name, None)) is not None), default)
