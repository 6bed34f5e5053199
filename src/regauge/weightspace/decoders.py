"""Decoders from vectors to networks.

Each decoder has a small frozen dataclass of settings, whose method `build` creates a torch module.

A decoder module maps vectors `[models, inputs]` to parameters of one architecture with a model axis. The method
`standardize` measures the sizes of tensors on some networks, and `begin_at` initializes the decoder at one network. To
add a decoder, write a file with the dataclass and the module, and add the dataclass to `DECODERS`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regauge.core.typed_json import made_of, named
from regauge.weightspace.decoder import MLPDecoder
from regauge.weightspace.layers import LAYERS
from regauge.weightspace.template_decoder import TemplateDecoder

DecoderSettings = MLPDecoder | TemplateDecoder

DECODERS: dict[str, type[DecoderSettings]] = {"mlp": MLPDecoder, "template": TemplateDecoder}
"""Decoder classes by their names on the command line."""


def describe_decoder(settings: DecoderSettings) -> dict[str, Any]:
    """Return settings of a decoder as plain data for JSON."""
    made = named(settings, DECODERS)
    return made | ({"layer": named(settings.layer, LAYERS)} if isinstance(settings, TemplateDecoder) else {})


def decoder_of(made: Mapping[str, Any]) -> DecoderSettings:
    """Return the settings of a decoder from the data that `describe_decoder` returned.

    Raises:
        KeyError, TypeError, ValueError: The settings do not describe a decoder.
    """
    own = {name: value for name, value in made.items() if name != "layer"}
    settings: DecoderSettings = made_of(own, DECODERS)
    if isinstance(settings, TemplateDecoder):
        return replace(settings, layer=made_of(made["layer"], LAYERS))
    return settings
