"""Small transformers: their functions, and their random initialization."""

import pytest
import torch
from torch.nn import functional

from regauge.nets.transformer import GPT, Attention, Llama, ViT, initialize_transformer, rotary


def drawn(module: GPT | Llama | ViT, seed: int = 0) -> GPT | Llama | ViT:
    module.load_state_dict(initialize_transformer(module, torch.Generator().manual_seed(seed)))
    return module


@pytest.mark.parametrize("module", [GPT(11, 8, width=16), Llama(11, width=16)], ids=["gpt", "llama"])
def test_language_models_do_not_see_the_future(module: GPT | Llama) -> None:
    drawn(module)
    tokens = torch.arange(8).unsqueeze(0)
    other = tokens.clone()
    other[0, 5] = 9
    before, after = module(tokens), module(other)
    assert before.shape == (1, 8, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_vision_transformers_read_every_patch_at_its_place() -> None:
    module = drawn(ViT(8, 4, channels=3, classes=5, width=16))
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert module(image).shape == (1, 5)
    changed = module(image.roll(4, -1))
    assert not torch.allclose(module(image), changed)
    for y, x in ((0, 0), (0, 4), (4, 0), (4, 4)):
        other = image.clone()
        other[..., y, x] += 1
        assert not torch.allclose(module(image), module(other))
    with pytest.raises(ValueError, match="images of 8 pixels cannot be cut into patches of 3"):
        ViT(8, 3)


def test_attention_follows_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = Attention(8, 4, kv_heads=2, is_causal=True)
    x = torch.randn(2, 5, 8, generator=generator)
    heads = []
    for h in range(4):
        mine, shared = slice(2 * h, 2 * h + 2), slice(2 * (h // 2), 2 * (h // 2) + 2)
        q, k, v = attention.query(x)[..., mine], attention.key(x)[..., shared], attention.value(x)[..., shared]
        scores = (q @ k.mT / 2**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        heads.append(functional.softmax(scores, -1) @ v)
    assert torch.allclose(attention(x), attention.out(torch.cat(heads, -1)), atol=1e-6)


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(10, 4, 4), (8, 4, 3), (12, 4, 4)])
def test_heads_that_do_not_fit_are_refused(width: int, heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match="the width must be a multiple of the heads"):
        Attention(width, heads, kv_heads=kv_heads, is_rotary=True)


def test_rotary_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator, dtype=torch.float64).expand(1, 1, 6, 8) for _ in range(2))
    products = (rotary(q) @ rotary(k).mT)[0, 0]
    for distance in range(-5, 6):
        along = products.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along))
    assert products.diagonal(1)[0] != pytest.approx(float(products.diagonal(2)[0]))
    assert torch.allclose(rotary(q).norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize("make", [lambda: GPT(11, 8), lambda: Llama(11), ViT], ids=["gpt", "llama", "vit"])
def test_initial_values_come_from_the_generator(make: type[ViT]) -> None:
    module = make()
    params = initialize_transformer(module, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in module.parameters():  # Nothing of what the module was trained to is left.
            parameter.fill_(7)
    again = initialize_transformer(module, torch.Generator().manual_seed(0))
    other = initialize_transformer(module, torch.Generator().manual_seed(1))
    assert params.keys() == module.state_dict().keys()
    for name, tensor in params.items():
        assert torch.equal(tensor, again[name])
        is_fixed = "norm" in name or name.endswith("bias")
        assert torch.equal(tensor, other[name]) == is_fixed
        if is_fixed:
            assert torch.equal(tensor, torch.full_like(tensor, "norm" in name and name.endswith("weight")))
    deviation = float(params["blocks.0.attention.query.weight"].std())
    assert deviation == pytest.approx(1 / 8, rel=0.1)
    assert float(params["blocks.0.feed_forward.down.weight"].std()) < float(
        params["blocks.0.feed_forward.down.weight"].shape[1] ** -0.5
    )
