"""Tiny Hugging Face folders of many families, as transformers saves them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

TEXT: dict[str, Any] = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
WIDE = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = TEXT | WIDE | {"num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 4}
VISION = WIDE | {"image_size": 16, "patch_size": 8, "num_channels": 3}
CLIP_TEXT = TEXT | WIDE | {"max_position_embeddings": 16, "eos_token_id": 39}
SEQUENCES = TEXT | {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 0,
}
SPEECH = (
    TEXT
    | WIDE
    | {
        "vocab_size": 12,
        "conv_dim": (8, 8),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    }
)
LATENT = {"kv_lora_rank": 6, "q_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
ROUTED = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
CLIP = {"num_frames": 4, "tubelet_size": 2}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL = {"vocab_size": 24, "initializer_range": 0.3}
SMALL_LLAMA = SMALL | {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class FolderCase:
    """A model class with a small configuration; sub-configurations are dictionaries."""

    model: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """Return a random model in evaluation mode, far from its initial values."""
        config = getattr(transformers, self.config)(**self.settings)
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, self.model)(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in model.named_buffers():
                if name.endswith("running_mean"):
                    tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
                elif name.endswith("running_var"):
                    tensor.mul_(torch.rand(tensor.shape, generator=generator) + 0.5)
        return model

    def save(self, folder: Path, seed: int, *, shard: str = "1GB") -> Any:
        """Save a random model, and return it."""
        model: Any = self.build(seed)
        model.save_pretrained(folder, max_shard_size=shard)
        return model


def open_clean(folder: str | Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """Return the model that transformers reads from a folder; transformers must find exactly the expected
    parameters.
    """
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    """Return the logits of a small language model for some tokens."""
    tokens = torch.randint(3, 24, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def first_tensor(output: Any) -> Tensor:
    """Return the first floating-point tensor of an output."""
    for value in output.values() if isinstance(output, Mapping) else output:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError("the output has no tensor")


def causal(family: str, **settings: Any) -> FolderCase:
    """Return a case of a decoder with the usual names of settings."""
    return FolderCase(f"{family}ForCausalLM", f"{family}Config", DECODER | settings)


def masked(family: str, **settings: Any) -> FolderCase:
    """Return a case of a text encoder."""
    return FolderCase(f"{family}ForMaskedLM", f"{family}Config", DECODER | settings)


def image(family: str, **settings: Any) -> FolderCase:
    """Return a case of an image classifier."""
    return FolderCase(f"{family}ForImageClassification", f"{family}Config", settings)


DENSE: dict[str, FolderCase] = {
    "llama": causal("Llama"),
    "llama tied": causal("Llama", tie_word_embeddings=True),
    "mistral": causal("Mistral"),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3"),
    "gemma2": causal("Gemma2"),
    "gemma3": FolderCase("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | {"sliding_window": 8}),
    "phi": causal("Phi"),
    "phi3": causal("Phi3"),
    "falcon": FolderCase(
        "FalconForCausalLM",
        "FalconConfig",
        TEXT | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 20},
    ),
    "bloom": FolderCase("BloomForCausalLM", "BloomConfig", TEXT | {"hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "opt": causal("OPT", ffn_dim=20, word_embed_proj_dim=16),
    "cohere": causal("Cohere"),
    "stablelm": causal("StableLm"),
    "olmo2": causal("Olmo2"),
    "granite": causal("Granite"),
    "gpt2": FolderCase(
        "GPT2LMHeadModel", "GPT2Config", TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    ),
    "gpt neo": causal("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "gpt neox": causal("GPTNeoX"),
    "gptj": causal("GPTJ", n_embd=16, n_layer=2, n_head=2, rotary_dim=4, n_positions=32),
    "mamba": FolderCase(
        "MambaForCausalLM", "MambaConfig", TEXT | {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    ),
    "bert": masked("Bert"),
    "roberta": masked("Roberta"),
    "distilbert": masked("DistilBert", dim=16, hidden_dim=20, n_layers=2, n_heads=4),
    "albert": masked("Albert", embedding_size=8),
    "electra": masked("Electra", embedding_size=8),
    "deberta": masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "modernbert": masked("ModernBert"),
    "t5": FolderCase(
        "T5ForConditionalGeneration",
        "T5Config",
        TEXT | {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": FolderCase("BartForConditionalGeneration", "BartConfig", SEQUENCES),
    "marian": FolderCase("MarianMTModel", "MarianConfig", SEQUENCES),
    "whisper": FolderCase(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQUENCES | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
    ),
    "wav2vec2": FolderCase("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH),
    "hubert": FolderCase("HubertForCTC", "HubertConfig", SPEECH),
    "vit": image("ViT", **VISION),
    "deit": image("DeiT", **VISION),
    "beit": image("Beit", **VISION),
    "dinov2": image("Dinov2", **VISION),
    "swin": image("Swin", image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "convnext": image("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32),
    "resnet": image("ResNet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], image_size=32),
    "mobilenet": image("MobileNetV2", image_size=32, depth_multiplier=0.25),
    "segformer": FolderCase(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "num_attention_heads": [1, 2]}
        | {"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
        | {"decoder_hidden_size": 12, "image_size": 32},
    ),
    "clip": FolderCase(
        "CLIPModel", "CLIPConfig", {"text_config": CLIP_TEXT, "vision_config": VISION, "projection_dim": 8}
    ),
    "siglip": FolderCase("SiglipModel", "SiglipConfig", {"text_config": CLIP_TEXT, "vision_config": VISION}),
    "llava": FolderCase(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": DECODER | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 8},
            "image_token_index": 39,
            "vision_feature_layer": -1,
        },
    ),
    "blip2": FolderCase(
        "Blip2ForConditionalGeneration",
        "Blip2Config",
        {
            "text_config": DECODER | {"model_type": "opt", "ffn_dim": 20, "word_embed_proj_dim": 16},
            "vision_config": VISION,
            "qformer_config": WIDE | {"vocab_size": 40, "encoder_hidden_size": 16},
            "num_query_tokens": 4,
            "image_token_index": 39,
        },
    ),
}

MIXTURES: dict[str, FolderCase] = {
    "mixtral": causal("Mixtral", **FOUR),
    "qwen2 moe": causal(
        "Qwen2Moe", moe_intermediate_size=12, num_experts_per_tok=2, num_experts=4, shared_expert_intermediate_size=8
    ),
    "qwen3 moe": causal("Qwen3Moe", moe_intermediate_size=12, num_experts_per_tok=2, num_experts=4),
    "olmoe": causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "deepseek v2": causal("DeepseekV2", **ROUTED | LATENT | {"num_key_value_heads": 4}),
    "deepseek v3": causal(
        "DeepseekV3", **ROUTED | LATENT | {"n_routed_experts": 8, "n_group": 2, "num_key_value_heads": 4}
    ),
    "gpt oss": causal("GptOss", sliding_window=8, **FOUR),
    "granite moe": causal("GraniteMoe", **FOUR),
    "phimoe": causal("Phimoe", **FOUR),
    "jamba": causal(
        "Jamba",
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=3,
    ),
    "llama4": FolderCase(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        DECODER | FOUR | {"num_experts_per_tok": 1, "intermediate_size_mlp": 20, "attention_chunk_size": 8},
    ),
    "glm4 moe": causal("Glm4Moe", **ROUTED),
    "ernie": causal(
        "Ernie4_5_Moe",
        moe_intermediate_size=12,
        moe_k=2,
        moe_num_experts=4,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "hunyuan": causal("HunYuanMoEV1", num_experts=4, moe_topk=2),
    "dots1": causal("Dots1", **ROUTED),
    "minimax": causal("MiniMax", block_size=4, **FOUR),
    "minimax m2": causal("MiniMaxM2", **FOUR),
    "flex olmo": causal("FlexOlmo", num_experts=4, num_experts_per_tok=2),
    "granite shared": causal("GraniteMoeShared", shared_intermediate_size=8, **FOUR),
    "mellum": causal("Mellum", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
    "exaone moe": causal("ExaoneMoe", num_experts=4, **ROUTED),
    "solar": causal("SolarOpen", **ROUTED),
    "afmoe": causal("Afmoe", num_experts=4, num_dense_layers=1, moe_intermediate_size=12, num_experts_per_tok=2),
    "hunyuan 3": causal("HYV3", num_experts=4, **ROUTED),
    "cohere2 moe": causal("Cohere2Moe", num_experts=4, **ROUTED),
    "lfm2 moe": causal(
        "Lfm2Moe",
        num_experts=4,
        num_dense_layers=1,
        moe_intermediate_size=12,
        num_experts_per_tok=2,
        layer_types=["conv", "full_attention"],
    ),
    "qwen3 next": causal(
        "Qwen3Next",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_conv_kernel_dim=2,
        layer_types=["linear_attention", "full_attention"],
    ),
}

LOOPS: dict[str, FolderCase] = {
    "dbrx": FolderCase(
        "DbrxForCausalLM",
        "DbrxConfig",
        TEXT
        | {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}}
        | {"ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "switch": FolderCase(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        TEXT
        | {"d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 4, "num_experts": 4}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
        | {"decoder_start_token_id": 0},
    ),
    "nllb": FolderCase(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        SEQUENCES | {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": 64},
    ),
    "longcat": causal(
        "LongcatFlash",
        **LATENT | {"num_key_value_heads": 4, "qk_head_dim": 8, "num_layers": 1, "ffn_hidden_size": 20},
        expert_ffn_hidden_size=12,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
}
"""Mixtures of experts whose code loops over the experts that some token chose."""
MORE: dict[str, FolderCase] = {
    "jetmoe": causal("JetMoe", kv_channels=4, **FOUR),
    "glm4 lite": causal("Glm4MoeLite", **ROUTED | LATENT | {"num_key_value_heads": 4}),
    "videomae": FolderCase("VideoMAEForVideoClassification", "VideoMAEConfig", VISION | CLIP),
    "vivit": FolderCase("VivitForVideoClassification", "VivitConfig", VISION | CLIP | {"tubelet_size": [2, 8, 8]}),
    "timesformer": FolderCase("TimesformerForVideoClassification", "TimesformerConfig", VISION | CLIP),
    "vjepa2": FolderCase(
        "VJEPA2ForVideoClassification",
        "VJEPA2Config",
        WIDE
        | {"patch_size": 8, "crop_size": 16, "frames_per_clip": 4, "tubelet_size": 2, "mlp_ratio": 2}
        | {"pred_hidden_size": 16, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1, "num_pooler_layers": 1},
    ),
    "spectra": FolderCase(
        "ASTForAudioClassification", "ASTConfig", WIDE | {"patch_size": 8, "max_length": 32, "num_mel_bins": 16}
    ),
    "speech to text": FolderCase(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        SEQUENCES
        | {"input_feat_per_channel": 8, "max_source_positions": 64, "max_target_positions": 16}
        | {"conv_channels": 12, "conv_kernel_sizes": [3], "num_conv_layers": 1},
    ),
    "fnet": masked("FNet", type_vocab_size=2),
    "granite speech": FolderCase(
        "GraniteSpeech5ForCTC",
        "GraniteSpeech5CTCConfig",
        {
            "vocab_size": 12,
            "encoder_config": WIDE
            | {"num_key_value_heads": 4, "head_dim": 4, "num_mel_bins": 8, "vocab_size": 12, "context_size": 4}
            | {"conv_kernel_size": 3, "subsample_layers": [0]},
        },
    ),
}
"""Mixtures that sort tokens by expert, and models whose inputs are neither text, single images nor waveforms."""
CASES = DENSE | MIXTURES | LOOPS | MORE
