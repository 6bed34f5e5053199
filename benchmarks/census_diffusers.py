"""Models of diffusers in a census: settings that make each model small, and inputs on which the model runs."""

from collections.abc import Iterator
from typing import Any

import torch
from census_models import Made, NotBuilt
from torch import Tensor

CROSS = {"cross_attention_dim": 16, "attention_head_dim": 2, "norm_num_groups": 4, "layers_per_block": 1}
"""Settings of U-Nets that read a text."""
CHANNELS = (8, 16)
"""The channels of the levels of U-Nets and autoencoders."""
IMAGE, LATENT, VIDEO, TEXT = (2, 3, 16, 16), (2, 4, 8, 8), (2, 4, 2, 8, 8), (2, 5, 16)
"""Shapes of an image, a latent image, a latent video, and a text."""
AUTOENCODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": CHANNELS,
    "norm_num_groups": 4,
}
"""Settings of autoencoders for images."""
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
"""Settings of transformers."""
FLUX = HEADS | {"in_channels": 4, "num_single_layers": 1, "joint_attention_dim": 16, "axes_dims_rope": (2, 2, 4)}
"""Settings of transformers with two streams and rotary positions."""


def _levels(first: str, second: str) -> dict[str, Any]:
    """Return two levels of a U-Net on the way down, and two levels on the way up."""
    down = (first, second)
    up = tuple(name.replace("Down", "Up") for name in reversed(down))
    return {"down_block_types": down, "up_block_types": up, "block_out_channels": CHANNELS}


def _steps(*shape: int) -> Tensor:
    """Return the time steps of a diffusion."""
    return torch.full(shape, 3.0)


def _noise(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def _noised(shape: tuple[int, ...], first: str = "hidden_states", **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a noisy input, its time step, and further inputs."""
    return _noise(**{first: shape}) | {"timestep": _steps(2)} | _noise(**shapes)


def _streams(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Return inputs of transformers with two streams."""
    places = {"img_ids": torch.arange(48.0).reshape(16, 3) % 5, "txt_ids": torch.zeros(5, 3)}
    return _noised((2, 16, 4), encoder_hidden_states=TEXT, **shapes) | places


def diffusers_names() -> Iterator[str]:
    """Return the names of diffusers' model classes."""
    yield from _models()


def make_diffusers(name: str) -> Made:
    """Return a small model of diffusers and its inputs.

    Raises:
        NotBuilt: The installed version builds or runs it in another way.
    """
    import diffusers

    settings, inputs = _models()[name]
    try:
        net = getattr(diffusers, name)(**settings).eval()
        with torch.no_grad():
            net(**inputs)
    except Exception as error:  # Whatever the package raises says that this is no way to make the model.
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    return net, (), inputs


def _models() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return settings and inputs by the names of classes."""
    text = {"encoder_hidden_states": TEXT}
    masked = {"encoder_attention_mask": torch.ones(2, 5)}
    pooled = {"pooled_projections": (2, 16)}
    sizes = {name: torch.tensor([[16.0, 16.0]] * 2) for name in ("original_size", "target_size", "crop_coords")}
    cog = HEADS | {"in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8}
    return {
        "UNet1DModel": (
            {"sample_size": 32, "block_out_channels": (8, 8, 16), "extra_in_channels": 16},
            _noised((2, 2, 32), "sample"),
        ),
        "UNet2DModel": (
            _levels("DownBlock2D", "AttnDownBlock2D") | {"norm_num_groups": 4, "layers_per_block": 1},
            _noised(IMAGE, "sample"),
        ),
        "UNet2DConditionModel": (
            _levels("CrossAttnDownBlock2D", "DownBlock2D") | CROSS,
            _noised(LATENT, "sample", **text),
        ),
        "UNet3DConditionModel": (
            _levels("CrossAttnDownBlock3D", "DownBlock3D") | CROSS | {"attention_head_dim": 4},
            _noised(VIDEO, "sample", **text),
        ),
        "UNetMotionModel": (
            _levels("CrossAttnDownBlockMotion", "DownBlockMotion")
            | {"cross_attention_dim": 16, "num_attention_heads": 2, "norm_num_groups": 4, "layers_per_block": 1}
            | {"motion_num_attention_heads": 2},
            _noised(VIDEO, "sample", **text),
        ),
        "UNetSpatioTemporalConditionModel": (
            _levels("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal")
            | {"block_out_channels": (32, 64), "cross_attention_dim": 16, "num_attention_heads": 2}
            | {"layers_per_block": 1, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24},
            _noised((2, 2, 8, 8, 8), "sample", encoder_hidden_states=(2, 1, 16), added_time_ids=(2, 3)),
        ),
        "Kandinsky3UNet": (
            {"time_embedding_dim": 16, "groups": 4, "attention_head_dim": 4, "layers_per_block": 1}
            | {"block_out_channels": (8, 8, 16, 16), "cross_attention_dim": 16, "encoder_hid_dim": 16},
            _noised((2, 4, 16, 16), "sample", **text) | masked,
        ),
        "ControlNetModel": (
            {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "block_out_channels": CHANNELS}
            | {"conditioning_embedding_out_channels": (8, 8)}
            | CROSS,
            _noised(LATENT, "sample", controlnet_cond=IMAGE, **text),
        ),
        "AutoencoderKL": (AUTOENCODER, _noise(sample=IMAGE)),
        "VQModel": (AUTOENCODER | {"num_vq_embeddings": 16}, _noise(sample=IMAGE)),
        "AsymmetricAutoencoderKL": (
            {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
            | {"down_block_out_channels": CHANNELS, "up_block_out_channels": CHANNELS, "norm_num_groups": 4},
            _noise(sample=IMAGE),
        ),
        "AutoencoderKLTemporalDecoder": (
            {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 64)},
            _noise(sample=IMAGE) | {"num_frames": 2},
        ),
        "AutoencoderTiny": (
            {"encoder_block_out_channels": CHANNELS, "decoder_block_out_channels": CHANNELS[::-1]}
            | {"num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
            _noise(sample=IMAGE),
        ),
        "AutoencoderDC": (
            {"latent_channels": 4, "attention_head_dim": 4}
            | {f"{side}_block_types": ("ResBlock", "EfficientViTBlock") for side in ("encoder", "decoder")}
            | {f"{side}_block_out_channels": CHANNELS for side in ("encoder", "decoder")}
            | {f"{side}_layers_per_block": (1, 1) for side in ("encoder", "decoder")}
            | {f"{side}_qkv_multiscales": ((), (3,)) for side in ("encoder", "decoder")},
            _noise(sample=IMAGE),
        ),
        "AutoencoderOobleck": (
            {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2]}
            | {"decoder_channels": 8, "decoder_input_channels": 4},
            _noise(sample=(2, 2, 64)),
        ),
        "AutoencoderKLWan": (
            {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [False]}
            | {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
            _noise(sample=(1, 3, 1, 16, 16)),
        ),
        "Transformer2DModel": (
            HEADS | {"in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 16},
            _noise(hidden_states=(2, 8, 4, 4), **text),
        ),
        "TransformerTemporalModel": (
            HEADS | {"in_channels": 8, "norm_num_groups": 4},
            _noise(hidden_states=(4, 8, 4, 4)) | {"num_frames": 2},
        ),
        "DiTTransformer2DModel": (
            HEADS | {"sample_size": 8, "num_embeds_ada_norm": 8},
            _noise(hidden_states=LATENT) | {"timestep": torch.tensor([1, 3]), "class_labels": torch.tensor([1, 2])},
        ),
        "PixArtTransformer2DModel": (
            HEADS
            | {"sample_size": 8, "num_embeds_ada_norm": 8, "cross_attention_dim": 16, "caption_channels": 16}
            | {"use_additional_conditions": False},
            _noised(LATENT, **text) | {"added_cond_kwargs": {"aspect_ratio": None, "resolution": None}},
        ),
        "SD3Transformer2DModel": (
            HEADS
            | {"num_layers": 2, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16}
            | {"caption_projection_dim": 16, "pooled_projection_dim": 16, "pos_embed_max_size": 8},
            _noised(LATENT, **text, **pooled),
        ),
        "FluxTransformer2DModel": (FLUX | {"pooled_projection_dim": 16}, _streams(**pooled)),
        "BriaTransformer2DModel": (FLUX, _streams()),
        "ChromaTransformer2DModel": (
            FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 8, "approximator_layers": 1},
            _streams(),
        ),
        "AuraFlowTransformer2DModel": (
            {"sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "num_attention_heads": 2}
            | {"attention_head_dim": 8, "joint_attention_dim": 16, "caption_projection_dim": 16}
            | {"pos_embed_max_size": 16},
            _noised(LATENT, **text),
        ),
        "HunyuanDiT2DModel": (
            HEADS
            | {"num_layers": 2, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 16}
            | {"cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 8, "text_len": 5}
            | {"text_len_t5": 5, "use_style_cond_and_image_meta_size": False},
            _noised(LATENT, encoder_hidden_states_t5=TEXT, **text)
            | {"text_embedding_mask": torch.ones(2, 5), "text_embedding_mask_t5": torch.ones(2, 5)},
        ),
        "CogView3PlusTransformer2DModel": (
            cog | {"condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8},
            _noised(LATENT, **text) | sizes,
        ),
        "CogView4Transformer2DModel": (
            cog | {"condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)},
            _noised(LATENT, **text) | sizes,
        ),
        "CogVideoXTransformer3DModel": (
            cog | {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 5},
            _noised((2, 2, 4, 8, 8), **text),
        ),
        "LatteTransformer3DModel": (
            HEADS
            | {"in_channels": 4, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 16, "caption_channels": 16}
            | {"num_embeds_ada_norm": 8, "norm_type": "ada_norm_single", "norm_elementwise_affine": False}
            | {"activation_fn": "gelu-approximate", "attention_bias": True, "video_length": 2},
            _noised(VIDEO, **text),
        ),
        "LTXVideoTransformer3DModel": (
            HEADS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "caption_channels": 16},
            _noised((2, 32, 4), **text) | masked | {"num_frames": 2, "height": 4, "width": 4},
        ),
        "WanTransformer3DModel": (
            HEADS
            | {"attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16}
            | {"ffn_dim": 24, "rope_max_seq_len": 32},
            _noised(VIDEO, **text),
        ),
        "MochiTransformer3DModel": (
            HEADS
            | {
                "num_layers": 2,
                "in_channels": 4,
                "text_embed_dim": 16,
                "pooled_projection_dim": 16,
                "time_embed_dim": 4,
            },
            _noised(VIDEO, **text) | {"encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool)},
        ),
        "HunyuanVideoTransformer3DModel": (
            HEADS
            | {"in_channels": 4, "out_channels": 4, "num_single_layers": 1, "num_refiner_layers": 1}
            | {"text_embed_dim": 16, "pooled_projection_dim": 16, "rope_axes_dim": (2, 2, 4), "guidance_embeds": False},
            _noised(VIDEO, **text, **pooled) | masked,
        ),
        "SanaTransformer2DModel": (
            HEADS
            | {"in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8}
            | {"cross_attention_dim": 16, "caption_channels": 16, "sample_size": 8},
            _noised(LATENT, **text),
        ),
        "Lumina2Transformer2DModel": (
            {"sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 1, "num_refiner_layers": 1}
            | {"num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 4, "axes_dim_rope": (4, 4, 4)}
            | {"axes_lens": (16, 16, 16), "cap_feat_dim": 16},
            _noised(LATENT, **text) | {"encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool)},
        ),
        "QwenImageTransformer2DModel": (
            HEADS | {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (2, 2, 4)},
            _noised((2, 16, 16), **text)
            | {"encoder_hidden_states_mask": torch.ones(2, 5), "img_shapes": [[(1, 4, 4)]] * 2},
        ),
        "StableAudioDiTModel": (
            HEADS
            | {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_key_value_attention_heads": 1}
            | {"cross_attention_dim": 16, "time_proj_dim": 8, "global_states_input_dim": 8}
            | {"cross_attention_input_dim": 16},
            _noised((2, 4, 8), global_hidden_states=(2, 1, 8), **text),
        ),
        "PriorTransformer": (
            HEADS | {"embedding_dim": 16, "num_embeddings": 5},
            _noised((2, 16), proj_embedding=(2, 16), **text),
        ),
        "T5FilmDecoder": (
            {
                "input_dims": 4,
                "targets_length": 8,
                "d_model": 16,
                "num_layers": 1,
                "num_heads": 2,
                "d_kv": 8,
                "d_ff": 24,
            },
            {"encodings_and_masks": [(torch.randn(2, 5, 16), torch.ones(2, 5))]}
            | {"decoder_input_tokens": torch.randn(2, 8, 4), "decoder_noise_time": torch.tensor([0.3, 0.6])},
        ),
    }
