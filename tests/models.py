"""A list of architectures in small configurations, with the groups that a person would name in each architecture.

The field `expected` writes the groups as text. `S16` permutes 16 units, `GL6` contains all invertible 6 x 6 matrices,
and `O10` contains all rotations of 10 units. `S8^4` has an independent copy in each of 4 blocks, and `3*S16` stands for
three such groups. `scales`, `signs` and `shifts` are the numbers of families over all groups, permuted or not.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from convnext import ConvNeXt
from densenet import DenseNet
from mobilenet import MobileNetV2
from resnet50 import resnet50
from torch import Tensor, nn
from torch.nn import functional
from unet import UNet
from vgg16 import vgg16

import regauge as rg
from regauge.nets.resnet import resnet20
from regauge.nets.siren import Siren
from regauge.nets.transformer import GPT, Llama, ViT


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the groups that discovery must find.

    Attributes:
        name: The unique name.
        module: A function that returns the model.
        inputs: A function that returns the positional inputs.
        expected: Permuted groups and matrix groups, in the notation of this file.
        scales: Families of positive scales, over all groups.
        signs: Families of signs.
        shifts: Families of half-period shifts.
        kwargs: A function that returns the keyword inputs.
        outputs: The outputs that must be preserved.
        irrelevant: Ends of the names of parameters that provably cannot influence the outputs, so their placements may
            be missing. For example, the softmax does not depend on the bias of a key projection.
        is_slow: Whether the case runs only with the slow tests.
    """

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    expected: str
    scales: int = 0
    signs: int = 0
    shifts: int = 0
    kwargs: Callable[[], dict[str, Any]] = field(default=dict)
    outputs: Any = None
    irrelevant: tuple[str, ...] = ()
    is_slow: bool = False


class Residual(nn.Module):
    """`x + body(x)`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Recurrent(nn.Module):
    """A classifier that reads the mean over time of a recurrent network."""

    def __init__(self, cell: type[nn.RNNBase], hidden: int = 12, **options: Any) -> None:
        super().__init__()
        self.rnn = cell(5, hidden, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


class CellLoop(nn.Module):
    """A recurrent cell in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(5, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 12)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.head(h)


class Concatenation(nn.Module):
    """Two branches, joined before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 6), nn.Linear(5, 9), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x).relu(), self.right(x).tanh()], -1))


class GatedMLP(nn.Module):
    """`F.glu` on the halves of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.head = nn.Linear(5, 24), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.glu(self.expand(x), -1))


class TiedAutoencoder(nn.Module):
    """An autoencoder whose decoder is the transpose of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5))
        self.bias, self.out = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(functional.linear(x, self.weight, self.bias))
        return functional.linear(hidden, self.weight.t(), self.out)


class ScalarGates(nn.Module):
    """Residual branches that are multiplied by parameters without axes, as in ReZero."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(5, 8), nn.Linear(8, 3)
        self.up = nn.ModuleList([nn.Linear(8, 9) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(9, 8) for _ in range(2)])
        self.gates = nn.ParameterList([torch.tensor(0.5 + k) for k in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for up, down, gate in zip(self.up, self.down, self.gates, strict=True):
            x = x + gate * down(up(x).relu())
        result: Tensor = self.out(x.sigmoid())
        return result


class CalledTwice(nn.Module):
    """A network that calls the same layer twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.head = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.shared(x).relu()
        x = self.shared(x).relu()
        return self.head(x)


class PixelShuffle(nn.Module):
    """Upsampling by rearranged channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pixel_shuffle(self.conv2(self.conv1(x).relu()), 2)
        return self.conv3(x.relu())


class ShuffleUnit(nn.Module):
    """Grouped 1 x 1 convolution, channel shuffle, grouped 1 x 1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, groups=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.stem(x).relu()).relu()
        x = functional.channel_shuffle(x, 2)
        return self.head(self.conv2(x).relu().mean((-2, -1)))


class SkipNeRF(nn.Module):
    """An MLP whose middle layer reads the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 16)
        self.fc3, self.head = nn.Linear(16 + 6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc2(self.fc1(x).relu()).relu()
        hidden = self.fc3(torch.cat([hidden, x], -1)).relu()
        return self.head(hidden)


class SqueezeExcite(nn.Module):
    """Channels that are multiplied by the outputs of a small network of channel means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 12, 3, padding=1), nn.Linear(12, 3)
        self.squeeze, self.excite = nn.Linear(12, 4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        gate = self.excite(self.squeeze(x.mean((-2, -1))).relu()).sigmoid()
        return self.head((x * gate[:, :, None, None]).mean((-2, -1)))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a classifier on the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)
        self.stem = nn.Linear(5, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x)).mean(1))


def normal(*shape: int) -> Callable[[], tuple[Any, ...]]:
    """Return one input of standard normal values."""
    return lambda: (torch.randn(shape, generator=torch.Generator().manual_seed(0)),)


def tokens(vocabulary: int = 17, length: int = 6) -> Callable[[], tuple[Any, ...]]:
    """Return one input of token ids."""
    return lambda: (torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(0)),)


def mlp(act: type[nn.Module]) -> Callable[[], nn.Module]:
    """Return an MLP with widths 5, 16, 12 and 3."""
    return lambda: nn.Sequential(nn.Linear(5, 16), act(), nn.Linear(16, 12), act(), nn.Linear(12, 3))


def plain_cnn() -> nn.Module:
    """Return a network of two convolutions, a flatten, and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(12 * 2 * 2, 20), nn.ReLU(), nn.Linear(20, 3)),
    )


def grouped_cnn(groups: int, out: int) -> Callable[[], nn.Module]:
    """Return a network with a grouped convolution between two ordinary convolutions."""
    return lambda: nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, out, 3, padding=1, groups=groups), nn.ReLU()),
        *(nn.Conv2d(out, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def small_unet() -> nn.Module:
    """Return a U-Net with two resolutions and attention to a context at the coarser resolution."""
    return UNet(2, channels=(8, 16), blocks=1, depths=(0, 1), head_size=4, context=6, groups=4)


def hugging(model: str, config: str | None = None, /, **options: Any) -> Callable[[], nn.Module]:
    """Return a model of `transformers`, built from a configuration."""

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers
        experts = options.get("_experts_implementation")
        settings = getattr(transformers, config or f"{model.partition('For')[0]}Config")(
            **{key: value for key, value in options.items() if not key.startswith("_")}
        )
        if experts is not None:
            settings._experts_implementation = experts
        result: nn.Module = getattr(transformers, model)(settings).eval()
        return result

    return make


TEXT = {"vocab_size": 17, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **{"vocab_size": 17, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False},
}
BERT = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40},
}
KEY_BIAS = ("k_proj.bias", "key.bias", "k_lin.bias")
NO_CACHE: Callable[[], dict[str, Any]] = lambda: {"use_cache": False}  # noqa: E731


def _clip_inputs() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 17, (2, 6), generator=generator)
    ids[:, -1] = 2
    return (ids, torch.randn(2, 3, 16, 16, generator=generator))


def _t5_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 17, (2, 11), generator=generator)
    return {"input_ids": ids[:, :6], "decoder_input_ids": ids[:, 6:], "use_cache": False}


def _whisper_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 17, (2, 5), generator=generator)
    features = torch.randn(2, 8, 40, generator=generator)
    return {"input_features": features, "decoder_input_ids": ids, "use_cache": False}


def _unet_inputs() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    image, context = torch.randn(2, 2, 8, 8, generator=generator), torch.randn(2, 5, 6, generator=generator)
    return (image, torch.tensor([3.0, 40.0]), context)


IMAGE = normal(2, 3, 8, 8)
IMAGE32 = normal(2, 3, 32, 32)

CASES = (
    Case("mlp_relu", mlp(nn.ReLU), normal(4, 5), "S16 S12", scales=2),
    Case("mlp_leaky", mlp(nn.LeakyReLU), normal(4, 5), "S16 S12", scales=2),
    Case("mlp_gelu", mlp(nn.GELU), normal(4, 5), "S16 S12"),
    Case("mlp_tanh", mlp(nn.Tanh), normal(4, 5), "S16 S12", signs=2),
    Case("mlp_sine", mlp(Sine), normal(4, 5), "S16 S12", signs=2, shifts=2),
    Case("mlp_linear", mlp(nn.Identity), normal(4, 5), "GL16 GL12"),
    Case("siren", lambda: Siren(2, 16, 1, depth=3), normal(4, 2), "3*S16", signs=3, shifts=3),
    Case("cnn_flatten", plain_cnn, normal(2, 3, 10, 10), "S20 S12 S8", scales=3),
    Case(
        "vgg16",
        lambda: vgg16(width=1 / 16, hidden=(20, 12), image=64),
        normal(2, 3, 64, 64),
        "2*S4 2*S8 3*S16 6*S32 S20 S12",
        scales=15,
    ),
    Case(
        "vgg16_batch",
        lambda: vgg16(width=1 / 16, hidden=(20, 12), norm="batch"),
        IMAGE32,
        "2*S4 2*S8 3*S16 6*S32 S20 S12",
        scales=28,
        signs=13,
    ),
    # One scale before and one after each normalization of a stream or an inner axis; signs only before.
    Case("resnet20_batch_B", resnet20, IMAGE, "4*S64 4*S32 4*S16", scales=33, signs=21),
    Case("resnet20_batch_A", lambda: resnet20(shortcut="A"), IMAGE, "3*S64 3*S32 6*S16 2*S8", scales=51, signs=37),
    Case("resnet20_layer_B", lambda: resnet20(norm="layer"), IMAGE, "4*S64 4*S32 4*S16", scales=12),
    Case(
        "resnet20_layer_A",
        lambda: resnet20(norm="layer", shortcut="A"),
        IMAGE,
        "3*S64 3*S32 6*S16 2*S8",
        scales=14,
        is_slow=True,
    ),
    Case("resnet20_group_B", lambda: resnet20(norm="group"), IMAGE, "12*S4 4*S16^4 4*S8^4 4*S4^4", 12, 21),
    # Fewer than there are: the four normalization groups of the first stream are found to share one order.
    Case(
        "resnet20_group_A",
        lambda: resnet20(norm="group", shortcut="A"),
        IMAGE,
        "3*S16^4 3*S8^4 3*S4^4 10*S4",
        25,
        9,
        is_slow=True,
    ),
    Case("resnet20_filter_B", lambda: resnet20(norm="filter"), IMAGE, "4*S64 4*S32 4*S16", scales=12, signs=21),
    Case(
        "resnet20_filter_A",
        lambda: resnet20(norm="filter", shortcut="A"),
        IMAGE,
        "3*S64 3*S32 6*S16 2*S8",
        scales=14,
        signs=37,
        is_slow=True,
    ),
    Case("resnet50", lambda: resnet50(10, width=4), IMAGE32, "S128 S64 7*S32 13*S16 8*S8 7*S4", 90, 53, is_slow=True),
    Case(
        "mobilenet_v2",
        lambda: MobileNetV2(10, width=0.5, settings=((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2)), last=64),
        IMAGE32,
        "3*S96 S64 S48 3*S16 S8",
        scales=19,
        signs=19,
    ),
    Case(
        "densenet",
        lambda: DenseNet(10, depths=(2, 2), growth=4, stem=8),
        IMAGE32,
        "4*S16 2*S8 4*S4",
        scales=27,
        signs=10,
    ),
    Case("convnext", lambda: ConvNeXt(10, depths=(1, 1), widths=(8, 16)), IMAGE32, "S8 S16 S32 S64", 6, 6),
    Case("unet", small_unet, _unet_inputs, "16*GL4^4 4*S64 2*S32 4*S16 19*S4 3*S2 6*S4^4 4*S2^4", 20, 32, is_slow=True),
    Case("lstm", lambda: Recurrent(nn.LSTM), normal(2, 6, 5), "2*S12", signs=2),
    Case("lstm_both_ways", lambda: Recurrent(nn.LSTM, bidirectional=True), normal(2, 6, 5), "4*S12", signs=4),
    Case("lstm_cell_loop", CellLoop, normal(2, 4, 5), "S12", signs=1),
    Case("gru", lambda: Recurrent(nn.GRU), normal(2, 6, 5), "2*S12", signs=2),
    Case("rnn_tanh", lambda: Recurrent(nn.RNN), normal(2, 6, 5), "2*S12", signs=2),
    Case("rnn_relu", lambda: Recurrent(nn.RNN, nonlinearity="relu"), normal(2, 6, 5), "2*S12", scales=2),
    # A scale and a sign of the stream for each gain between it and its readers; RMSNorm lets one sign more through.
    Case("gpt", lambda: GPT(17, 6, width=24), tokens(), "2*S96 S24 2*S4 4*GL6^4", 5, 5, irrelevant=KEY_BIAS),
    Case("llama", lambda: Llama(17, width=32), tokens(), "2*S85 S32 2*S2 2*S2^2 2*SO2^8 2*GL8^2", 9, 8),
    Case(
        "vit", lambda: ViT(16, 8, width=24), normal(2, 1, 16, 16), "2*S96 S24 2*S4 4*GL6^4", 5, 5, irrelevant=KEY_BIAS
    ),
    Case("torch_transformer", Encoder, normal(2, 6, 5), "2*S20 S16 2*S4 4*GL4^4", scales=3, signs=1),
    Case("pixel_shuffle", PixelShuffle, IMAGE, "S16 S8", scales=2),
    Case("concatenation", Concatenation, normal(4, 5), "S6 S9", scales=1, signs=1),
    Case("glu", GatedMLP, normal(4, 5), "S12", scales=1, signs=1),
    Case("tied_autoencoder", TiedAutoencoder, normal(4, 5), "S8", signs=1),
    Case("scalar_gates", ScalarGates, normal(4, 5), "2*S9 S8", scales=4),
    Case("called_twice", CalledTwice, normal(4, 5), "S16", scales=1),
    Case("grouped_conv", grouped_cnn(3, 12), IMAGE, "S3 2*S4^3", scales=2),
    Case("depthwise_conv", grouped_cnn(12, 12), IMAGE, "S12", scales=2),
    Case("depthwise_multiplier", grouped_cnn(12, 24), IMAGE, "S12 S2^12", scales=2),
    Case("shuffle_unit", ShuffleUnit, IMAGE, "2*S2 2*S4^2 S2^4", scales=3),
    Case("skip_nerf", SkipNeRF, normal(4, 6), "3*S16", scales=3),
    Case("squeeze_excite", SqueezeExcite, IMAGE, "S12 S4", scales=2),
    Case(
        "hf_vit",
        hugging("ViTForImageClassification", **BERT, image_size=16, patch_size=8, num_labels=3),
        normal(2, 3, 16, 16),
        "2*S40 S24 2*S4 4*GL6^4",
        scales=5,
        signs=5,
        irrelevant=KEY_BIAS,
    ),
    Case(
        "hf_bert",
        hugging("BertForSequenceClassification", **TEXT, **BERT, max_position_embeddings=16, num_labels=3),
        tokens(),
        "2*S40 2*S24 2*S4 4*GL6^4",
        scales=1,
        signs=2,
        irrelevant=KEY_BIAS,
    ),
    Case(
        "hf_distilbert",
        hugging(
            "DistilBertForSequenceClassification",
            **{"vocab_size": 17, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40},
            **{"max_position_embeddings": 16, "num_labels": 3},
        ),
        tokens(),
        "2*S40 2*S24 2*S4 4*GL6^4",
        scales=2,
        signs=1,
        irrelevant=KEY_BIAS,
    ),
    Case(
        "hf_gpt2",
        hugging("GPT2LMHeadModel", "GPT2Config", **TEXT, n_embd=24, n_layer=2, n_head=4, n_positions=16),
        tokens(),
        "2*S96 S24 2*S4 4*GL6^4",
        scales=4,
        signs=4,
        kwargs=NO_CACHE,
    ),
    Case(
        "hf_gpt_neox",
        hugging("GPTNeoXForCausalLM", **{**LLAMA, "num_key_value_heads": None}),
        tokens(),
        "2*S40 S32 2*S4 2*SO2^4 2*GL8^4 2*GL6^4",
        scales=7,
        signs=5,
        kwargs=NO_CACHE,
    ),
    Case(
        "hf_llama",
        hugging("LlamaForCausalLM", **LLAMA),
        tokens(),
        "2*S40 S32 2*S2 2*S2^2 2*SO2^8 2*GL8^2",
        scales=9,
        signs=8,
        kwargs=NO_CACHE,
    ),
    Case(
        "hf_qwen3",
        hugging("Qwen3ForCausalLM", **LLAMA, head_dim=8),
        tokens(),
        "2*S40 S32 2*S2 2*S2^2 2*GL8^2",
        scales=9,
        signs=20,
        kwargs=NO_CACHE,
    ),
    Case(
        "hf_mixtral",
        hugging(
            "MixtralForCausalLM",
            **{**LLAMA, "intermediate_size": 20},
            num_local_experts=4,
            num_experts_per_tok=2,
            _experts_implementation="batched_mm",
        ),
        tokens(),
        "S32 2*S20^4 2*S4 2*S2 2*S2^2 2*SO2^8 2*GL8^2",
        scales=9,
        signs=8,
        kwargs=NO_CACHE,
    ),
    Case(
        "hf_t5",
        hugging(
            "T5ForConditionalGeneration",
            **{"vocab_size": 17, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4},
            **{"pad_token_id": 0, "decoder_start_token_id": 1},
        ),
        tuple,
        "4*S40 S24 2*S4 12*GL6^4",
        scales=15,
        signs=12,
        kwargs=_t5_inputs,
        outputs="logits",
    ),
    Case(
        "hf_clip",
        hugging(
            "CLIPModel",
            "CLIPConfig",
            text_config={**BERT, **TEXT, "max_position_embeddings": 16},
            vision_config={**BERT, "image_size": 16, "patch_size": 8},
            projection_dim=10,
        ),
        _clip_inputs,
        "4*S40 2*S24 4*S4 O10 8*GL6^4",
        scales=12,
        signs=10,
        outputs="logits_per_image",
        irrelevant=KEY_BIAS,
    ),
    Case(
        "hf_whisper",
        hugging(
            "WhisperForConditionalGeneration",
            **{"vocab_size": 17, "num_mel_bins": 8, "d_model": 24, "max_source_positions": 20},
            **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40},
            **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40},
            **{"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        ),
        tuple,
        "4*S40 3*S24 6*S4 12*GL6^4",
        scales=11,
        signs=11,
        kwargs=_whisper_inputs,
        outputs="logits",
    ),
    Case(
        "hf_resnet",
        hugging(
            "ResNetForImageClassification",
            **{"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 3},
        ),
        IMAGE32,
        "S32 S16 5*S8 4*S4",
        scales=26,
        signs=15,
    ),
    Case(
        "hf_segformer",
        hugging(
            "SegformerForSemanticSegmentation",
            **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]},
            **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2]},
            **{"decoder_hidden_size": 12, "num_labels": 3},
        ),
        IMAGE32,
        "2*GL12 2*GL4^4 2*GL4^2 S32 2*S16 S12 2*S8 S4 S2",
        scales=11,
        signs=10,
        irrelevant=KEY_BIAS,
    ),
    Case(
        "hf_dinov2",
        hugging(
            "Dinov2ForImageClassification",
            **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2},
            **{"image_size": 16, "patch_size": 8, "num_labels": 3},
        ),
        normal(2, 3, 16, 16),
        "2*S48 S24 2*S4 4*GL6^4",
        scales=9,
        signs=9,
        irrelevant=KEY_BIAS,
    ),
    Case(
        "hf_mamba",
        hugging(
            "MambaForCausalLM",
            **{"vocab_size": 17, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 3},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        ),
        tokens(),
        "2*S32 S16 2*S4 2*GL3",
        scales=8,
        signs=7,
        kwargs=NO_CACHE,
    ),
)


def symmetry_of(case: Case) -> rg.Symmetry:
    """Return the symmetry of a case, discovered once for all tests of a process that need no check."""
    return _symmetry_of(case.name)


@cache
def _symmetry_of(name: str) -> rg.Symmetry:
    case = next(case for case in CASES if case.name == name)
    with torch.random.fork_rng():  # Tests draw the same numbers whether or not it is known.
        return rg.discover(case.module().eval(), case.inputs(), case.kwargs(), outputs=case.outputs, verify=False)
