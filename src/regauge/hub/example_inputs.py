"""Example inputs of transformers models, generated from the configuration and the names of the arguments."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from regauge.checkpoints.names.from_transformers import is_of_transformers
from regauge.discovery.known_sizes import without_memory

TOKENS = 8
"""The number of tokens in an example sentence of a language model."""
SAMPLES = 4000
"""The number of samples in an example sound. `FRAMES` is the number of frames in its spectrum."""
FRAMES = 64
TRIALS = 30
"""The largest number of combinations of input shapes that are tried."""

MASKED = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
"""Names of mask inputs, each with the name of the token input to which the mask applies."""
MEDIA = {
    "pixel_values": ("get_image_features", ("image_token_id", "image_token_index")),
    "pixel_values_videos": ("get_video_features", ("video_token_id", "video_token_index")),
    "input_features": ("get_audio_features", ("audio_token_id", "audio_token_index")),
    "input_values": ("get_audio_features", ("audio_token_id", "audio_token_index")),
}
"""Inputs that are not text, each with the method that computes the input's features and the settings that name the
input's placeholder token."""
COMPANIONS = (
    *("image_sizes", "image_grid_thw", "video_grid_thw", "pixel_attention_mask", "spatial_shapes", "bbox"),
    *("input_features_mask", "feature_attention_mask", "padding_mask", "future_values", "future_time_features"),
    *("decoder_input_values", "encoder_hidden_states", "actions", "rewards", "returns_to_go", "timesteps"),
    *("visual_feats", "visual_pos", "lang_ids", "merge_sizes", "pixel_position_ids"),
)
"""Additional inputs that models may read, and that some models require."""
KINDS = "mm_token_type_ids"
"""The name of the input that states the medium (text, image or sound) of each token."""
STEPS = {"states": "state_dim", "actions": "act_dim", "rewards": "reward_dim", "returns_to_go": "return_dim"}
"""Inputs of a decision transformer at each step, with the settings that give their widths (1 without a setting)."""
VISUAL = {"visual_feats": "visual_feat_dim", "visual_pos": "visual_pos_dim"}
"""Features and positions of objects detected in an image, with the settings that give their widths."""
Maker: TypeAlias = Callable[[], Tensor]
Kwargs: TypeAlias = dict[str, Tensor]


def example_inputs(module: nn.Module, config: Any) -> Iterator[Kwargs]:
    """Yield small inputs that a transformers model accepts, beginning with inputs that reach most of its weights.

    If a model also reads images or sounds, the last inputs are embeddings, which skip the submodels that compute
    embeddings. A symmetry that is discovered with embeddings as inputs does not change the axes of the embeddings. The
    first inputs that are yielded reach all submodels, and at most one later input skips a submodel.

    Raises:
        ValueError: No inputs are known that the model accepts.
    """
    made, device = _Made(module, config), next(module.parameters()).device
    reason, parts, spare = "", parts_of(module), None
    has_any = False
    for trial in made.trials():
        kwargs = {name: tensor.to(device) for name, tensor in trial.items()}
        try:
            is_text = device.type == "meta" and not made.media
            if not (is_text or _reaches(module, kwargs, parts) or "inputs_embeds" in kwargs):
                spare = trial if spare is None else spare
                continue
        except Exception as error:  # A model may raise any error for unsuitable inputs.
            if not _needs_values(error):
                said = " ".join(str(error).split())[:200]
                reason = reason or f"with {', '.join(kwargs)}: {type(error).__name__}: {said}"
                continue
        has_any = True
        yield trial
    if spare is not None:
        yield spare
    elif not has_any:
        reason = reason or f"it takes {', '.join(made.first) or made.main!r}"
        raise ValueError(
            f"no example inputs are known that {type(module).__name__} runs on ({reason}); write a factory that "
            "returns (module, (), {...}), or give `input_shape=`"
        )


def _needs_values(error: Exception) -> bool:
    """Return whether an error was raised only because an operation on the meta device depends on values."""
    return isinstance(error, NotImplementedError) or "a meta tensor" in str(error)


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodels of a transformers model, such as an image model, by name."""
    found = {}
    for name, part in module.named_modules():
        if name and is_of_transformers(part) and any(tensor.ndim for tensor in part.parameters()):
            found[name] = part
    return found


def _reaches(module: nn.Module, kwargs: Kwargs, parts: Mapping[str, nn.Module]) -> bool:
    """Return whether calling the model with the given inputs calls every submodel."""
    called: set[str] = set()
    with ExitStack() as stack, torch.no_grad():
        for name, part in parts.items():
            stack.callback(part.register_forward_pre_hook(lambda *_, name=name: called.add(name)).remove)
        module(**kwargs)
    return called == set(parts)


def with_masks(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with masks that include every token, for models that cannot be traced without masks."""
    known, masks = inspect.signature(module.forward).parameters, {}
    for name, tokens in MASKED.items():
        if name in known and tokens in kwargs:
            masks[name] = torch.ones_like(kwargs[tokens])
    return {**kwargs, **masks}


class _Made:
    """Generated inputs of one model, by the argument names of its `forward`."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module, self.config = module, config
        parameters = inspect.signature(module.forward).parameters
        self.known = list(parameters)
        named = getattr(module, "main_input_name", "input_ids")
        self.main = named if isinstance(named, str) else named[0]
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        required = [n for n, p in parameters.items() if p.default is p.empty and p.kind in plain]
        if not required or self.main in required:
            required = [self.main, *required]
        is_pair = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in self.known
        first = [name for name in required if name in self.known] + ["decoder_input_ids"] * is_pair
        self.first = list(dict.fromkeys(first))
        self.media = [name for name in MEDIA if name in self.known]
        self.has_text = "input_ids" in self.known
        self.generator = torch.Generator().manual_seed(0)

    def trials(self) -> Iterator[Kwargs]:
        """Yield inputs that the model may accept."""
        with_text = self.media if self.has_text else []
        rest = [name for name in self.first if name not in (*with_text, "input_ids")]
        together = [with_text] * (len(with_text) > 1) + [[medium] for medium in with_text]
        for media in together:
            yield from self._with_text([*media, *rest])
        if not with_text or len(rest) < len(self.first) - ("input_ids" in self.first):
            yield from self._combined(self.first)
            companions = [name for name in COMPANIONS if name in self.known and name not in self.first]
            for more in [companions, *([one] for one in companions)] if companions else []:
                yield from self._combined([*self.first, *more])
        elif self._is_text_alone():
            yield from self._combined(self.first)
        if with_text and "inputs_embeds" in self.known:
            needed = [name for name in self.first if name != "input_ids"]
            yield from self._combined([*needed, "inputs_embeds"])

    def _is_text_alone(self) -> bool:
        """Return whether a model has no separate submodel for images or sounds."""
        return not any(hasattr(self.config, name) for name in ("vision_config", "audio_config"))

    def _with_text(self, names: Sequence[str]) -> Iterator[Kwargs]:
        """Yield media inputs with a text that contains placeholder tokens for the media features, and media inputs with
        a text without placeholder tokens.
        """
        companions = [name for name in COMPANIONS if name in self.known]
        for more in [[], companions] if companions else [[]]:
            for kwargs in self._combined([*names, *more]):
                text = self._marked(kwargs)
                if text is not None:
                    yield kwargs | {"input_ids": text} | self._kinds_of(text)
                yield kwargs | {"input_ids": self._tokens()}

    def _kinds_of(self, text: Tensor) -> Kwargs:
        """Return the medium of each token (text, images, videos, sounds), for models that read the media of tokens."""
        if KINDS not in self.known:
            return {}
        kinds = torch.zeros_like(text)
        for kind, medium in enumerate(("pixel_values", "pixel_values_videos", "input_features"), 1):
            kinds[text == self._mark(medium)] = kind
        return {KINDS: kinds}

    def _mark(self, medium: str) -> int:
        """Return the placeholder token for the features of a medium, or -1 without such a token."""
        return next((int(v) for n in MEDIA[medium][1] if (v := getattr(self.config, n, None)) is not None), -1)

    def _combined(self, names: Sequence[str]) -> Iterator[Kwargs]:
        """Yield inputs with the given names, in all combinations of candidate shapes. Yield nothing if a name is
        unknown.
        """
        offers = [self._offers(name) for name in names]
        if names and all(offers):
            for chosen in itertools.islice(itertools.product(*offers), TRIALS):
                yield {name: make() for name, make in zip(names, chosen, strict=True)}

    def _offers(self, name: str) -> list[Maker]:
        """Return functions that make candidate values for a transformers argument with a given name. The result is
        empty for unknown names.
        """
        if name == "pixel_values_videos":
            return self._patches() if "video_grid_thw" in self.known else self._pictures()[1:]
        if name == "pixel_values" and not {"spatial_shapes", "pixel_position_ids"}.isdisjoint(self.known):
            return [partial(self._noise, 2, 16, width) for width in self._patch_widths()] + self._pictures()
        if name == "pixel_values":
            return self._patches() if self._has_grid() else self._pictures()
        if name in ("prompt_pixel_values", "prompt_masks"):
            return self._pictures()[:1]
        if name.startswith(("input_features", "input_values", "decoder_input_values", "spectrogram", "audio_")):
            return self._masks(2, FRAMES) if name.endswith("mask") else self._sounds()
        if name.startswith(("past_", "future_")):
            return self._series(name)
        if name == "pixel_attention_mask" and "spatial_shapes" in self.known:
            return self._masks(2, 16)
        if name.endswith("mask") or name == "past_values_padding":
            return self._masks(2, TOKENS)
        height, width = self._sides()
        integers: dict[str, list[Any]] = {
            "image_sizes": [[height, width]] * 2,
            "image_grid_thw": [[1, 4, 4]] * 2,
            "video_grid_thw": [[1, 4, 4]] * 2,
            "grid_thw": [[1, 4, 4]] * 2,
            "spatial_shapes": [[4, 4]] * 2,
            "bbox": [[[1, 2, 3, 4]] * TOKENS] * 2,
            "freq": [[0]] * 2,
            "timesteps": [list(range(TOKENS))] * 2,
            "lang_ids": [0, len(self._setting("languages", [0])) - 1],
            "merge_sizes": [1] * 2,
            "pixel_position_ids": [[[place // 4, place % 4] for place in range(16)]] * 2,
            "task_inputs": [[3] * self._setting("task_seq_len", TOKENS)] * 2,
        }
        if name == "lang_ids" and integers[name][1] > 1:
            return []  # Two examples do not reach the adapters of more languages.
        if name in integers:
            whole = partial(torch.tensor, integers[name])
            return [whole, lambda: whole().float() / 8] if name == "bbox" else [whole]
        if name == "hidden_states" and self._has_grid():
            return self._patches()
        if name.endswith(("input_ids", "_ids")):
            return [self._tokens, *self._codes()]
        if name in ("visual_feats", "visual_pos"):
            return [partial(self._noise, 2, TOKENS, self._setting(VISUAL[name], 4))]
        if name in STEPS:
            return [partial(self._noise, 2, TOKENS, self._setting(STEPS[name], 1))]
        if name.endswith(("states", "embeds", "latents")) or name == "inputs":
            other = self._setting("encoder_hidden_size", self._width()) if "encoder" in name else self._width()
            found: list[Maker] = [
                partial(self._noise, 2, TOKENS, width) for width in dict.fromkeys((self._width(), other))
            ]
            return [self._tokens, *found, *self._pictures()] if name == "inputs" else found
        return []

    def _has_grid(self) -> bool:
        """Return whether the model reads images as lists of patches, with the numbers of patches along height and
        width.
        """
        return not {"image_grid_thw", "grid_thw"}.isdisjoint(self.known)

    def _codes(self) -> list[Maker]:
        """Return functions that make several codes for each token, in the format of audio codecs."""
        count = self._setting(("num_codebooks", "num_quantizers", "num_channels"), None)
        return [] if count is None else [lambda: torch.stack([self._tokens() for _ in range(int(count))], -1)]

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _masks(self, *shape: int) -> list[Maker]:
        return [partial(torch.ones, *shape, dtype=torch.int64)]

    def _tokens(self) -> Tensor:
        try:
            text = self.config.get_text_config()
        except ValueError:  # there are several text configurations
            text = self.config
        count = getattr(text, "vocab_size", None) or self._setting("vocab_size", 16)
        drawn = torch.randint(3, max(4, int(count)), (2, TOKENS), generator=self.generator)
        marks = torch.tensor([value for name, value in vars(self.config).items() if _is_mark(name, value)])
        return torch.where(torch.isin(drawn, marks), 3, drawn)

    def _width(self) -> int:
        try:
            return int(self.module.get_input_embeddings().weight.shape[-1])  # type: ignore[operator]
        except (AttributeError, NotImplementedError, TypeError):
            return int(self._setting("hidden_size", 32))

    def _sides(self) -> tuple[int, int]:
        size = self._setting(("image_size", "crop_size", "img_size", "input_size", "max_img_size"), 224)
        if isinstance(size, Mapping):
            size = (size.get("height", 224), size.get("width", 224))
        return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))

    def _pictures(self) -> list[Maker]:
        """Return functions that make images and image sequences (also channels first), or pairs for image matching."""
        sides, channels = self._sides(), self._setting(("num_channels", "in_channels", "in_chans"), 3)
        frames = self._setting(("num_frames", "frames_per_clip"), None)
        shapes: list[tuple[int, ...]] = [(channels, *sides)]
        for count in [1, 4, 2] if frames is None else [int(frames)]:
            shapes += [(count, channels, *sides), (channels, count, *sides)]
        return [partial(self._noise, 2, *shape) for shape in shapes]

    def _patches(self) -> list[Maker]:
        """Return functions that make flat patches of two images. The number of patches agrees with the grid."""
        return [partial(self._noise, 2 * 4 * 4, width) for width in self._patch_widths()]

    def _patch_widths(self) -> list[int]:
        """Return possible widths of a flat patch. Some models read patches of two frames, which no setting states."""
        side, frames = self._setting("patch_size", 14), self._setting("temporal_patch_size", None)
        width = self._setting(("in_channels", "in_chans", "num_channels"), 3) * side * side
        return [width * int(frames)] if frames else [width, 2 * width]

    def _sounds(self) -> list[Maker]:
        """Return functions that make sounds: spectra, with frequency or time as the first axis, and waveforms."""
        bins = self._setting(("num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel"), 80)
        positions = self._setting("max_source_positions", 1500)
        weights = [p for p in self.module.parameters() if p.ndim in (2, 3)]
        widths = dict.fromkeys([bins, *(p.shape[1] for p in weights[:3])])
        shapes: list[tuple[int, ...]] = [(1, bins, 2 * positions), (1, SAMPLES), (1, 1, SAMPLES), (2, SAMPLES)]
        shapes += [(2, FRAMES, width) for width in widths]
        shapes += [(2, self._setting("max_length", FRAMES), bins), (2, 1, FRAMES, bins)]
        is_wave = self.main == "input_values"
        return [partial(self._noise, *shape) for shape in (shapes[1:] + shapes[:1] if is_wave else shapes)]

    def _series(self, name: str) -> list[Maker]:
        """Return functions that make several time series, and the known features at every time."""
        lags = self._setting("lags_sequence", None) or [0]
        past, future = self._setting("context_length", 32) + max(lags), self._setting("prediction_length", None) or 1
        length = past if name.startswith("past_") else future
        if name.endswith("time_features"):
            return [partial(self._noise, 2, length, self._setting("num_time_features", 0))]
        wide = self._setting(("num_input_channels", "input_size"), 1)
        shapes = [(2, length, wide), (2, length)] if wide > 1 else [(2, length), (2, length, wide)]
        if name.endswith("values"):
            return [partial(self._noise, *shape) for shape in shapes]
        return [partial(torch.ones, shape) for shape in shapes]

    def _marked(self, kwargs: Kwargs) -> Tensor | None:
        """Return text after placeholder tokens for media features, with as many placeholders as features."""
        marks = []
        for medium in (name for name in MEDIA if name in kwargs):
            mark, find = self._mark(medium), getattr(self.module, MEDIA[medium][0], None)
            if mark < 0 or find is None:
                return None
            taken = inspect.signature(find).parameters
            try:
                with torch.no_grad(), without_memory(self.module):
                    found = find(**{name: t for name, t in kwargs.items() if name in taken})
            except Exception:  # A model may raise any error if it needs further inputs.
                return None
            marks.append(torch.full((2, _count(getattr(found, "pooler_output", found))), mark))
        return torch.cat([*marks, self._tokens()], 1)

    def _setting(self, names: str | Sequence[str], default: Any) -> Any:
        """Return the value of the first given setting that occurs in the configuration or in one of its sections."""
        parts = [self.config, *(getattr(self.config, name, None) for name in self.config.sub_configs)]
        wanted = (names,) if isinstance(names, str) else names
        found = (getattr(part, name, None) for part in parts for name in wanted)
        return next((value for value in found if value is not None), default)


def _is_mark(name: str, value: Any) -> bool:
    """Return whether a setting is a placeholder token, a begin token or an end token of images, videos or sounds."""
    return (
        isinstance(value, int) and name.endswith(("token_id", "token_index")) and name[:3] not in ("bos", "eos", "pad")
    )


def _count(found: Any) -> int:
    """Return the number of features of each of the two images or sounds."""
    if isinstance(found, list | tuple):
        return int(found[0].shape[-2])
    return int(found.shape[-2]) if found.ndim > 2 else len(found) // 2
