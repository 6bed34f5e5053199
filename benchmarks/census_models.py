"""Architectures of a census: sources of named models, each made small, with inputs on which the model runs.

A source is a function that yields names, and `make(name)` builds the model of a name. A model of transformers is a
configuration in a folder, which is opened as users open folders. All other models are modules with inputs.
"""

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regauge as rg

SIZES = {
    "hidden": 32,
    "inner": 40,
    "head": 8,
    "rank": 8,
    "state": 8,
    "tokens": 64,
    "positions": 64,
    "image": 32,
    "patch": 8,
    "experts": 4,
    "layers": 2,
}
"""The sizes in tiny configurations."""
HEADS = (
    *("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM"),
    *("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION"),
    *("DEPTH_ESTIMATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "TEXT_TO_WAVEFORM"),
    *("TEXT_TO_SPECTROGRAM", "TIME_SERIES_PREDICTION", "SEQUENCE_CLASSIFICATION"),
)
"""Tasks of transformers. For each type, the model of the first task that the type has is used."""


class NotBuilt(Exception):
    """An error: the model could not be built, so nothing is known about its discovery."""


Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def transformers_names() -> Iterator[str]:
    """Return the types of transformers, each with one class."""
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS]
    tables.append(modeling_auto.MODEL_MAPPING_NAMES)
    for kind in modeling_auto.MODEL_MAPPING_NAMES:
        found = next(table[kind] for table in tables if kind in table)
        yield f"{kind}/{found if isinstance(found, str) else found[0]}"


def open_transformers(name: str, folder: str) -> rg.hub.Model:
    """Return a type of transformers in a small configuration, saved to a folder and opened from there.

    Among the configurations that can be built, the first one that runs on example inputs is used. If no configuration
    runs, the first configuration that can be built is used.
    """
    from transformers import CONFIG_MAPPING

    kind, architecture = name.split("/")
    model, lack = None, None
    ways = (tiny, own_keys, whole_lists, partial(divided, 16), partial(divided, 8), partial(divided, 4), shallow)
    for shrink in ways:
        try:
            config = small_configuration(CONFIG_MAPPING[kind], shrink)
            config.architectures = [architecture]
            config.save_pretrained(folder)
            found = rg.open_model(folder, values="always", verify=True, retrace=True)
            most = LARGEST if shrink is shallow else MOST
            if sum(p.numel() for p in found.blank.parameters()) > most:
                raise NotBuilt(f"more than {most} parameters")
            is_running = not found.built.lack
        except Exception as error:
            if is_bug(error):
                raise
            lack = lack or error
            continue
        model = model or (shrink, found)
        if is_running:
            return found
    if model is None:
        raise NotBuilt(f"{type(lack).__name__}: {lack}") from lack
    shrink, found = model
    config = small_configuration(CONFIG_MAPPING[kind], shrink)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return rg.open_model(folder, values="always", verify=True, retrace=True)


def is_bug(error: Exception) -> bool:
    """Return whether regauge itself raised an exception without a proper message, which no configuration explains."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(rg.__file__).parent)
    return is_ours and not isinstance(error, ValueError | KeyError | ImportError | NotImplementedError)


def small_configuration(kind: type, shrink: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Return a small configuration of a type, whose sections are made small by the same rule."""
    try:
        whole = kind()
    except Exception:
        whole = None
    parts = {}
    for key, part in getattr(kind, "sub_configs", {}).items():
        own = getattr(whole, key, None)
        part = type(own) if own is not None and hasattr(own, "to_dict") else part
        if part.__name__ != "AutoConfig":
            parts[key] = small_configuration(part, shrink).to_dict()
    settings = shrink(whole.to_dict()) if whole is not None else {}
    known = {n: v for n, v in settings.items() if n not in parts}
    for drop in ((), ("layer_types",)):
        try:
            return fit_sections(kind(**{n: v for n, v in known.items() if n not in drop}, **parts))
        except Exception as error:
            last = error
    raise last


def fit_sections(config: Any) -> Any:
    """Return a configuration in which the rotary angles of time, height and width fill the head, whose width may have
    changed.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    code = Path(inspect.getfile(type(config))).with_name(
        f"modeling_{Path(inspect.getfile(type(config))).parent.name}.py"
    )
    has_sections = code.exists() and "mrope_section" in code.read_text()  # Some have sections by default.
    if "mrope_section" in rope or (rope and has_sections):
        heads = getattr(config, "num_attention_heads", None) or 1
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        half = int(width * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    return config


def own_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tiny settings with equal numbers of key heads and query heads."""
    small = tiny(settings)
    return small | {name: 4 for name in small if "kv_head" in name or "key_value_head" in name}


def whole_lists(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tiny settings with unchanged lists."""
    return {name: value for name, value in own_keys(settings).items() if not isinstance(value, list)}


def divided(factor: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration with all widths divided by one factor, so sums of widths remain
    consistent.
    """
    small = {name: value for name, value in tiny(settings).items() if is_kept_small(name, settings[name])}
    for name, value in settings.items():
        if name in small or isinstance(value, bool) or any(word in name for word in (*SKIPPED, *FIXED)):
            continue
        if isinstance(value, int) and value >= 2 * factor and value % factor == 0:
            small[name] = value // factor
        if (
            isinstance(value, list)
            and value
            and all(isinstance(v, int) and v % factor == 0 and v >= factor for v in value)
        ):
            small[name] = [v // factor for v in value]
        if isinstance(value, dict) and "mrope_section" in value:
            small[name] = value | {"mrope_section": [v // factor for v in value["mrope_section"]]}
    return small


def shallow(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with fewer layers, a smaller vocabulary, and unchanged widths."""
    small, words = tiny(settings), ("layer", "depth", "vocab", "num_blocks")
    return {
        name: value
        for name, value in small.items()
        if name == "layer_types" or (any(word in name for word in words) and not isinstance(value, list))
    }


def is_kept_small(name: str, value: Any) -> bool:
    """Return whether a setting is not a width, so the value of `tiny` fits any widths."""
    words = ("layer", "depth", "vocab", "position", "token_id", "token_index", "expert", "per_tok", "topk", "top_k")
    return any(word in name for word in words) and "dim" not in name and "size" not in name.replace("vocab_size", "")


MOST = 10_000_000
"""The largest number of parameters of a small configuration."""
LARGEST = 60_000_000
"""The largest number of parameters of a model without a small configuration."""
FIXED = (
    "head",
    "layer",
    "image",
    "patch",
    "stride",
    "kernel",
    "group",
    "position",
    "token",
    "vocab",
    "ratio",
    "mel",
    "bins",
)
"""Words in the names of settings that are not widths."""
SKIPPED = ("version", "architectures", "id2label", "label2id", "model_type", "_name_or_path", "dtype", "torch_dtype")


def tiny(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return smaller values for the settings of a configuration, chosen by the words in their names."""
    small: dict[str, Any] = {}
    tokens = iter(range(SIZES["tokens"] - 1, 8, -1))
    types = settings.get("layer_types")
    layers = max([SIZES["layers"], *(len(value) for name, value in settings.items() if is_choice(name, value))])
    if isinstance(types, list) and types and isinstance(types[0], str):
        distinct = list(dict.fromkeys(types))[:4]
        small["layer_types"] = distinct if len(distinct) > 1 else distinct * layers
        layers = len(small["layer_types"])
    for name, value in settings.items():
        if name in small or any(word in name for word in SKIPPED):
            continue
        if value is None and name.endswith(("per_tok", "_token_index")):
            small[name] = 2 if name.endswith("per_tok") else next(tokens)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            continue
        if is_choice(name, value):
            small[name] = list(range(len(value)))
        elif isinstance(value, int):
            found = tiny_integer(name, value, layers, tokens)
            if found != value:
                small[name] = found
        elif isinstance(value, list) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            found = tiny_list(name, value, layers)
            if found is not None and found != value:
                small[name] = found
        elif isinstance(value, list) and value and "layer" in name:
            small[name] = value[:layers]
        elif isinstance(value, dict) and "mrope_section" in value:
            small[name] = value | {"mrope_section": [2, 1, 1]}
    return small


def is_choice(name: str, value: Any) -> bool:
    """Return whether a setting selects the layers whose outputs are returned."""
    return name.endswith("out_indices") and isinstance(value, list) and all(isinstance(one, int) for one in value)


def tiny_integer(name: str, value: int, layers: int, tokens: Iterator[int]) -> int:
    """Return a smaller value for a setting with one integer."""
    if name.endswith(("_token_id", "_token_index", "token_ids")) or name in ("image_token", "audio_token"):
        return value if value < 8 else next(tokens)
    if any(word in name for word in ("vocab", "num_embeddings", "codebook_size")):
        return min(value, SIZES["tokens"])
    if "position" in name or name in ("n_ctx", "seq_length", "max_length", "max_seq_len", "block_size"):
        return min(value, SIZES["positions"])
    if "kv_head" in name or "key_value_head" in name or name in ("num_kv_heads", "n_head_kv"):
        return min(value, 2)
    if name in ("head_dim", "attention_head_size", "kv_channels", "d_kv", "d_head") or name.endswith("head_dim"):
        return min(value, SIZES["head"])
    if "head" in name and ("num" in name or name.startswith("n_") or name.endswith(("heads", "head"))):
        return min(value, 4)
    if "per_tok" in name or name in ("moe_k", "num_selected_experts", "moe_topk", "top_k"):
        return min(value, 2)
    if "expert" in name and ("num" in name or name.startswith("n_")):
        return value if value < 2 or "shared" in name else SIZES["experts"]
    if name in ("n_group", "topk_group", "num_expert_group", "n_groups", "num_groups"):
        return min(value, 1)
    if "first_k_dense" in name:
        return min(value, 1)
    if "feat_extract_layers" in name:
        return 2
    if "layer" in name and ("num" in name or name.startswith("n_") or name.endswith(("layers", "layer"))):
        return min(value, layers)
    if name in ("depth", "num_blocks", "decoder_depth", "encoder_depth"):
        return min(value, layers)
    if "image_size" in name or name in ("img_size", "input_size", "crop_size"):
        return min(value, SIZES["image"])
    if name == "patch_size":
        return min(value, SIZES["patch"])
    if "lora_rank" in name or name.endswith("_rank") or "low_rank" in name:
        return min(value, SIZES["rank"])
    if name in ("state_size", "d_state", "ssm_state_size", "mamba_d_state"):
        return min(value, SIZES["state"])
    words = ("intermediate", "ffn", "d_ff", "ff_dim", "inner_dim", "mlp_dim", "feed_forward", "n_inner")
    if any(word in name for word in words) and "ratio" not in name:
        return min(value, SIZES["inner"])
    words = ("hidden", "d_model", "n_embd", "embed", "dim", "width", "channels", "units", "projection", "d_proj")
    if any(word in name for word in words) and value > SIZES["hidden"] and "num_" not in name:
        return SIZES["hidden"]
    return value


def tiny_list(name: str, value: list[int], layers: int) -> list[int] | None:
    """Return smaller values for a setting with several integers."""
    if name in ("conv_dim", "conv_stride", "conv_kernel"):
        return [8, 8] if name == "conv_dim" else value[:2]
    if "depth" in name or name in ("layers", "num_blocks", "num_layers", "blocks"):
        return [min(v, 1) for v in value]
    if "head" in name:
        return [min(v, 2) for v in value]
    if "layer" in name or "indices" in name or name.endswith("indexes"):
        return None
    if "image_size" in name or name in ("img_size", "input_size"):
        return [min(v, SIZES["image"]) for v in value]
    if any(word in name for word in ("hidden", "dim", "channel", "width", "embed", "feature")):
        return [max(4, min(v, 8 * (1 + k))) for k, v in enumerate(value)] if max(value) > 64 else None
    return None


def small_builder(build: Callable[..., nn.Module], factor: int) -> Callable[..., nn.Module]:
    """Return a timm builder with one block in each stage, and with widths divided by a factor if the class accepts
    widths.
    """

    def smaller(cls: Any, variant: str, pretrained: bool, *args: Any, **kwargs: Any) -> nn.Module:
        kwargs = dict(kwargs)
        if isinstance(kwargs.get("embed_dim"), int) and isinstance(kwargs.get("num_heads"), int):
            kwargs |= {"embed_dim": 48, "num_heads": 3}
        for name, value in kwargs.items():
            if name in ("depth", "num_layers") and isinstance(value, int):
                kwargs[name] = min(value, 2)
            elif name in ("depths", "layers", "num_blocks") and isinstance(value, tuple | list):
                kwargs[name] = type(value)(min(v, 1) if isinstance(v, int) else v for v in value)
            elif name in ("dims", "embed_dims", "channels", "embed_dim", "out_chs") and isinstance(value, tuple | list):
                kwargs[name] = type(value)(v // factor for v in value)
        if hasattr(kwargs.get("model_cfg"), "blocks") and is_dataclass(kwargs["model_cfg"]):
            kwargs["model_cfg"] = small_blocks(kwargs["model_cfg"], factor)
        return build(cls, variant, pretrained, *args, **kwargs)

    return smaller


def small_blocks(config: Any, factor: int) -> Any:
    """Return a configuration of timm's networks of blocks with narrow blocks, in which each block occurs once."""

    def small(block: Any) -> Any:
        return tuple(map(small, block)) if isinstance(block, tuple | list) else replace(block, d=1, c=block.c // factor)

    stem = config.stem_chs
    narrow = stem // factor if isinstance(stem, int) else type(stem)(v // factor for v in stem)
    return replace(config, blocks=small(config.blocks), stem_chs=narrow, num_features=config.num_features // factor)


def timm_names() -> Iterator[str]:
    """Return the names of timm models: first the smallest models of each module, by number of parameters, then further
    models.
    """
    import timm

    def size(name: str) -> tuple[int, int, str]:
        words = ("test", "atto", "femto", "pico", "nano", "xxs", "xxt", "xs", "tiny", "mini", "small", "lite", "_s")
        return next((k for k, word in enumerate(words) if word in name), len(words)), len(name), name

    ranked = {module: sorted(timm.list_models(module=module), key=size) for module in timm.list_modules()}
    for k in range(12):
        for module, names in ranked.items():
            if k < len(names):
                yield f"{module}/{names[k]}"


def make_timm(name: str) -> Made:
    """Return a narrow timm model with one block in each stage, on images of 64 pixels, as far as the model allows these
    changes.
    """
    import timm

    module, model = name.split("/")
    home = importlib.import_module(f"timm.models.{module}")
    plain = getattr(home, "build_model_with_cfg", None)

    def make(factor: int, size: int | None, own: bool) -> tuple[nn.Module, Tensor]:
        if plain is not None:
            home.build_model_with_cfg = small_builder(plain, factor) if factor else plain
        more = {} if size is None else {"img_size": size}
        net = timm.create_model(model, pretrained=False, num_classes=5, **more)
        side = net.default_cfg["input_size"][-1] if own else 64
        return net, torch.randn(2, 3, side, side)

    sizes: tuple[tuple[int | None, bool], ...] = ((64, False), (None, False), (None, True))
    ways = [(factor, *size) for factor in (4, 1, 0) for size in sizes]
    return first_that_runs(partial(make, *way) for way in ways)


def torchvision_names() -> Iterator[str]:
    from torchvision import models

    large = (
        r"large|huge|_[lh]_|_\d?[368]_?2?gf|128gf|wide|101|152|v2_[lm]|b[4-7]$|201|161|64x4d|_b$|_b_16|_b_32"
        r"|convnext_(base|small)|_s$|_[1-9]+_?\d?gf"
    )
    yield from (name for name in models.list_models() if not re.search(large, name))


def make_torchvision(name: str) -> Made:
    """Return an unchanged torchvision model, on small images or videos, or on larger inputs if it needs them."""
    from torchvision import models

    has_backbone = name in models.list_models(models.detection) + models.list_models(models.segmentation)
    more = {"weights_backbone": None} if has_backbone else {}
    if name.startswith("raft"):
        return models.get_model(name, weights=None).eval(), (torch.randn(2, 3, 128, 128),) * 2, {}
    is_video = name in models.list_models(models.video)
    shapes = ((2, 3, 16, 112, 112), (2, 3, 16, 224, 224)) if is_video else ((2, 3, n, n) for n in (64, 224, 299))
    return first_that_runs(
        partial(_with_input, models.get_model, shape, name, weights=None, **more) for shape in shapes
    )


VIT: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 40,
    "dim_head": 16,
    "channels": 3,
    "frames": 4,
    "image_patch_size": 8,
    "frame_patch_size": 2,
    "spatial_depth": 1,
    "temporal_depth": 1,
    "seq_len": 32,
    "num_patches": 16,
    "cls_depth": 1,
    "local_patch_size": 4,
    "global_depth": 1,
    "local_depth": 1,
    "num_register_tokens": 2,
    "num_hyperconn_streams": 2,
    "ndim": 2,
    "input_shape": (32, 32),
    "sm_dim": 16,
    "lg_dim": 32,
    "sm_patch_size": 4,
    "sm_enc_depth": 1,
    "sm_enc_heads": 2,
    "sm_enc_mlp_dim": 24,
    "lg_patch_size": 8,
    "lg_enc_depth": 1,
    "lg_enc_heads": 2,
    "lg_enc_mlp_dim": 24,
    "sm_enc_dim_head": 8,
    "lg_enc_dim_head": 8,
    "cross_attn_depth": 1,
    "cross_attn_heads": 2,
    "max_tokens_per_depth": (8, 4),
    "t2t_layers": ((7, 4), (3, 2)),
    "patch_merge_layer": 1,
    "patch_merge_num_tokens": 4,
    "num_hierarchies": 2,
    "block_repeats": (1, 1),
    "dim_conv_stem": 16,
    "window_size": 4,
    "img_size": 32,
    "embedding_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "n_input_channels": 3,
    "kernel_size": 3,
    "num_frames": 4,
}
"""Arguments of vit-pytorch classes, by name."""


def vit_names() -> Iterator[str]:
    import pkgutil

    import vit_pytorch

    for found in pkgutil.iter_modules(vit_pytorch.__path__):
        yield found.name


def make_vit(name: str) -> Made:
    """Return an instance of the last class in a file of vit-pytorch that accepts images, sounds or videos."""
    try:
        home = importlib.import_module(f"vit_pytorch.{name}")
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    classes = [
        c
        for c in vars(home).values()
        if inspect.isclass(c) and issubclass(c, nn.Module) and c.__module__ == home.__name__
    ]
    ways = []
    for cls in reversed(classes):
        known = inspect.signature(cls.__init__).parameters
        kwargs = {
            key: value
            for key, value in VIT.items()
            if (key in known and known[key].default is inspect._empty) or (key in ("dim_head",) and key in known)
        }
        shapes = ((2, 3, 32, 32), (2, 3, 4, 32, 32), (2, 3, 32), (2, 4, 3, 32, 32), (2, 3, 64, 64), (2, 3, 224, 224))
        ways += [partial(_with_input, cls, shape, **kwargs) for shape in shapes]
    return first_that_runs(ways, least=5)


ENCODERS = ("resnet18", "mobilenet_v2", "efficientnet-b0", "densenet121", "vgg11_bn", "mit_b0", "timm-regnetx_002")


DECODERS = (
    *("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "PAN", "UPerNet"),
    "Segformer",
)


def segmentation_names() -> Iterator[str]:
    """Return the names of every decoder of segmentation_models_pytorch with several encoders."""
    yield from (f"{decoder}/{encoder}" for encoder in ENCODERS for decoder in DECODERS)


def make_segmentation(name: str) -> Made:
    """Return a segmentation model on images of 64 pixels."""
    import segmentation_models_pytorch as smp

    decoder, encoder = name.split("/")
    settings = {"encoder_weights": None, "classes": 3}
    return first_that_runs([partial(_with_input, getattr(smp, decoder), (2, 3, 64, 64), encoder, **settings)])


def _with_input(
    make: Callable[..., nn.Module], shape: tuple[int, ...], *args: Any, **kwargs: Any
) -> tuple[nn.Module, Tensor]:
    return make(*args, **kwargs), torch.randn(shape)


def first_that_runs(ways: Iterable[Callable[[], tuple[nn.Module, Tensor]]], least: int = 1) -> Made:
    """Return the first model that runs on its input and has at least a given number of parameters.

    Raises:
        NotBuilt: Every way fails; the message is that of the last one.
    """
    last: Exception = NotBuilt("there is no way to make it")
    for make in ways:
        try:
            net, x = make()
            if sum(p.numel() for p in net.parameters()) > LARGEST:
                raise NotBuilt(f"more than {LARGEST} parameters")
            with torch.no_grad():
                net.eval()(x)
        except Exception as error:  # Whatever a package raises says that this is no way to make the model.
            last = error
        else:
            if len(list(net.parameters())) >= least:
                return net, (x,), {}
    raise NotBuilt(f"{type(last).__name__}: {last}") from last


def family(source: str, name: str) -> str:
    """Return the family of a model: its module in transformers, timm or torchvision, its decoder, or its file."""
    if source == "transformers":
        from transformers.models.auto.configuration_auto import model_type_to_module_name

        return model_type_to_module_name(name.split("/")[0])
    if source == "torchvision":
        from torchvision import models

        return models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
    return name.split("/")[0]
