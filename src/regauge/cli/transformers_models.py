"""The model of a Hugging Face folder, with inputs on which it can be traced."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regauge.cli.options import UsageError
from regauge.cli.user_code import users_code
from regauge.storage.checkpoints.transformers_names import find_factory

MATERIALIZED = 150_000_000
"""A folder's model with more parameters than this is built on the meta device, without values."""
EXPERTS = "batched_mm"
"""Of the ways in which transformers computes experts, the one whose operators and shapes depend on no values."""
TOKENS = 8
"""Length of the example sentence of a language model."""

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
