"""Models, networks and data by name: Python opens the same objects as the commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import regauge as rg
from regauge.cli.commands import as_options
from regauge.cli.main import main
from regauge.hub import bring_together, open_batches, open_task
from regauge.hub.every_expert import visit_every_expert
from regauge.hub.example_inputs import example_inputs
from regauge.nets import mlp

NETS = """
import torch
from regauge.nets import mlp


def make():
    return mlp(4, 6, 3), (torch.randn(2, 4),)


def bare():
    return mlp(4, 6, 3)


def batches():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return [(x, x[:, :3].argmax(1))]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        rg.save(mlp(4, 6, 3).state_dict(), f"{name}.safetensors")


def test_a_factory_is_built_and_traced_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rg.open_model("nets.py:make")
    assert model.symmetry == rg.discover(model.module, model.inputs)
    with torch.no_grad():
        assert model.module(*model.inputs).shape == (2, 3)
    assert rg.open_model("missing.py:make").name == "missing.py:make"
    with pytest.raises(ValueError, match=r"MODEL 'missing.py:make': there is no file"):
        _ = rg.open_model("missing.py:make").module


def test_inputs_are_brought_or_described() -> None:
    with pytest.raises(ValueError, match=r"gives no example inputs.*`input_shape=2x3x32x32`"):
        _ = rg.open_model("nets.py:bare").symmetry
    described = rg.open_model("nets.py:bare", input_shape=["5x4"])
    assert described.inputs[0].shape == (5, 4)
    assert described.symmetry.groups == rg.open_model("nets.py:make").symmetry.groups


def test_networks_are_opened_under_the_names_of_their_model() -> None:
    networks = rg.open_networks(["a.safetensors", "b.safetensors"], "nets.py:make")
    a, b = networks.checkpoints
    found = rg.align(a, b, networks.symmetry, out="python.safetensors")
    main(["align", "a.safetensors", "b.safetensors", "--model", "nets.py:make", "-o", "command.safetensors"])
    written = rg.load("command.safetensors")
    assert all(torch.equal(found.params[name], tensor) for name, tensor in written.items())
    with pytest.raises(ValueError, match=r"name the model with `model=`, or give `symmetry=\.\.\.`"):
        rg.open_networks(["a.safetensors", "b.safetensors"])


def test_a_symmetry_alone_is_enough() -> None:
    symmetry = rg.open_model("nets.py:make").symmetry
    networks = rg.open_networks(["a.safetensors"], symmetry=symmetry)
    assert networks.model is None
    assert networks.symmetry.groups == symmetry.groups


def test_data_are_opened_by_name() -> None:
    model = rg.open_model("nets.py:make", values="always")
    task = open_task(model, "nets.py:batches")
    assert task.name == "nets.py:batches"
    assert set(task.evaluate(rg.load("a.safetensors"))) == {"loss", "accuracy"}
    with pytest.raises(ValueError, match="`batch=` is 0"):
        open_batches("nets.py:batches", 0)


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("give `overwrite=True`", "give --overwrite"),
        ("say `tokenizer=union`, or leave `input_shape=` out", "say --tokenizer union, or leave --input-shape out"),
        ("write `out=OUT` and `dtype=...`", "write --output OUT and --dtype"),
        ("the name `fc1.weight` stays, and so does x = 3", "the name `fc1.weight` stays, and so does x = 3"),
    ],
)
def test_arguments_are_written_as_options(text: str, typed: str) -> None:
    assert as_options(text) == typed


def test_the_command_line_says_options(refused: Callable[..., str]) -> None:
    words = ("align", "a.safetensors", "b.safetensors", "-o", "c.safetensors")
    assert "name the model with --model, or give --symmetry" in refused(*words)
    assert "for example --input-shape 2x3x32x32" in refused(*words, "--model", "nets.py:bare")


def test_files_say_nothing_about_tokens() -> None:
    opened = [rg.Checkpoint.open(f"{name}.safetensors") for name in "ab"]
    assert bring_together(opened).networks == tuple(opened)


def perceiver() -> nn.Module:
    widths = {"d_latents": 16, "d_model": 16, "qk_channels": 16, "v_channels": 16}
    counts = {"num_latents": 4, "num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2}
    text = {"num_cross_attention_heads": 2, "vocab_size": 20, "max_position_embeddings": 8}
    return transformers.PerceiverForMaskedLM(transformers.PerceiverConfig(**widths, **counts, **text))


def moonshine() -> nn.Module:
    layers = {f"{side}_num_hidden_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"{side}_num_attention_heads": 2 for side in ("encoder", "decoder")}
    widths = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 20, "pad_token_id": 0}
    return transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(**layers, **heads, **widths))


def decisions() -> nn.Module:
    config = transformers.DecisionTransformerConfig(state_dim=3, act_dim=2, hidden_size=16, n_layer=1, n_head=2)
    return transformers.DecisionTransformerModel(config)


def querying() -> nn.Module:
    widths = {"hidden_size": 16, "intermediate_size": 20, "encoder_hidden_size": 12, "vocab_size": 20}
    config = transformers.Blip2QFormerConfig(num_hidden_layers=2, num_attention_heads=2, **widths)
    return transformers.Blip2QFormerModel(config)


def patched() -> nn.Module:
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Siglip2VisionConfig(
        hidden_size=16, intermediate_size=20, patch_size=4, num_patches=16, **layers
    )
    return transformers.Siglip2VisionModel(config)


def crossed() -> nn.Module:
    layers = {"l_layers": 1, "x_layers": 1, "r_layers": 1, "num_attention_heads": 2}
    widths = {"hidden_size": 16, "intermediate_size": 20, "vocab_size": 32, "visual_feat_dim": 6}
    return transformers.LxmertModel(transformers.LxmertConfig(**layers, **widths))


def lingual() -> nn.Module:
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "languages": ["en_XX", "de_DE"]}
    widths = {"hidden_size": 16, "intermediate_size": 20, "vocab_size": 32, "max_position_embeddings": 16}
    return transformers.XmodModel(transformers.XmodConfig(**layers, **widths, pad_token_id=1))


@pytest.mark.parametrize("make", [perceiver, moonshine, decisions, querying, patched, crossed, lingual])
def test_example_inputs_are_made_up_for_unusual_models(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module: Any = make().eval()
    kwargs = next(example_inputs(module, module.config))
    symmetry = rg.discover(module, (), kwargs)
    assert any(group.is_permuted for group in symmetry.groups)
    assert symmetry.verify(module, (), kwargs, generator=torch.Generator().manual_seed(1)).ok


def test_outputs_of_random_length_are_no_reason_to_visit_every_expert() -> None:
    class Length(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths.append(len(lengths) + 1)
            return super().forward(x)[:, : lengths[-1]]

    lengths: list[int] = []
    module = Length(3, 40)
    assert not visit_every_expert(module, (torch.ones(2, 3),), {})
    assert len(lengths) == 3


def test_inputs_that_leave_out_a_part_are_tried_once_and_last() -> None:
    config = transformers.Blip2Config(
        vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
        qformer_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "encoder_hidden_size": 16},
        text_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40},
        **{"num_query_tokens": 2, "image_token_id": 37},
    )
    module = transformers.Blip2ForConditionalGeneration(config).eval()
    given = list(example_inputs(module, config))
    with_images = [set(kwargs) for kwargs in given if "pixel_values" in kwargs]
    assert with_images[0] >= {"pixel_values", "input_ids"}
    called: list[nn.Module] = []
    for part in (module.vision_model, module.qformer, module.language_model):
        part.register_forward_pre_hook(lambda part, _: called.append(part))
    for kwargs in given:
        called.clear()
        module(**kwargs)
        is_whole = len(set(called)) == 3
        assert is_whole or "inputs_embeds" in kwargs or kwargs is given[-1]


def qwen2_5_vl() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 20, "out_hidden_size": 16, "fullatt_block_indexes": [0]}
    return transformers.Qwen2_5_VLConfig(**qwen_parts(vision | {"window_size": 16}))


def qwen2_vl() -> Any:
    return transformers.Qwen2VLConfig(**qwen_parts({"embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2}))


def qwen3_vl() -> Any:
    widths = {"hidden_size": 16, "intermediate_size": 20, "out_hidden_size": 16, "num_position_embeddings": 16}
    return transformers.Qwen3VLConfig(**qwen_parts(widths | {"deepstack_visual_indexes": [0]}))


def qwen_parts(vision: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return {
        "text_config": {**text, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 40, "rope_parameters": rope},
        "vision_config": {**vision, "depth": 1, "num_heads": 2, "patch_size": 4},
        **{"image_token_id": 37, "video_token_id": 38, "vision_start_token_id": 36, "vision_end_token_id": 35},
    }


@pytest.mark.parametrize(
    ("make", "is_blank"),
    [pytest.param(qwen2_vl, False, marks=pytest.mark.thorough), (qwen2_5_vl, False), (qwen3_vl, True)],
)
def test_a_model_of_images_and_text_is_traced_whole_with_values_and_without(
    tmp_path: Path, make: Callable[[], Any], is_blank: bool
) -> None:
    config = make()
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    whole = rg.open_model(tmp_path, values="always", retrace=True)
    if is_blank:  # A trace of such a model takes longer than all others of this file.
        blank = rg.open_model(tmp_path, values="never", retrace=True)
        assert blank.is_meta
        assert blank.symmetry.groups == whole.symmetry.groups
    names = {group.name for group in whole.symmetry.groups}
    assert any("visual" in name and ".attn.qkv" in name for name in names)
    assert any("language_model" in name and ".mlp" in name for name in names)
    assert whole.symmetry.verify(
        whole.module, (), whole.trace().kwargs, generator=torch.Generator().manual_seed(1), each_group=False
    ).ok


def test_a_grid_of_patches_says_the_sizes_of_a_vision_encoder() -> None:
    torch.manual_seed(0)
    widths = {"hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 20, "image_size": 56}
    module = transformers.Glm4vVisionModel(transformers.Glm4vVisionConfig(depth=1, num_heads=2, **widths)).eval()
    kwargs = next(example_inputs(module, module.config))
    symmetry = rg.discover(module, (), kwargs)
    sizes = {group.name: group.size for group in symmetry.groups}
    assert sizes["embeddings.position_embedding"] == 16
    assert sizes["blocks.0.mlp.gate_proj"] == 16
    assert sizes["blocks.0.attn.qkv.blocks"] == 2
    assert symmetry.verify(module, (), kwargs, generator=torch.Generator().manual_seed(1)).ok
    # A model without experts is left as it is.
    forward = module.forward
    assert not visit_every_expert(module, (), kwargs)
    assert module.forward == forward
