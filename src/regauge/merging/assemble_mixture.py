"""Mixtures of experts from dense networks: the attention of one network, the MLPs of several, and routers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.output import Output
from regauge.checkpoints.outputs.provenance import Input, Provenance
from regauge.checkpoints.outputs.staging import Staging, require_new_folder
from regauge.checkpoints.plain_files import read_object
from regauge.checkpoints.writing import Shard
from regauge.core.arguments import check_arguments
from regauge.core.counted import shorten
from regauge.core.params import round_to
from regauge.core.progress import Progress, no_progress
from regauge.hub.prompts import open_streams, open_tokens

Router: TypeAlias = Literal["hidden", "hidden_avg", "cheap_embed", "random", "uniform_random"]
"""Methods of initializing routers, by their names in mergekit."""
MLP = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
NOT_IN_MIXTURES = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
EMBEDDING = "model.embed_tokens.weight"
ALIKE = 5.0
"""A limit on the condition number of a router. Above this limit, the prompts of the experts are too similar."""


@dataclass(frozen=True)
class _Family:
    """A family of mixture models, such as Mixtral, with the names of its tensors and settings.

    Attributes:
        model: The type of the mixture's model.
        architecture: The class of the mixture's model.
        settings: The configuration keys for the number of experts and for the width of an expert, and configuration
            keys with fixed values.
        block: The name of the module that holds a layer's experts.
        parts: The names of an expert's three matrices, indexed by the names of the corresponding matrices of the dense
            MLP.
        has_shared: Whether one additional expert processes every token.
    """

    model: str
    architecture: str
    settings: tuple[str, str | None, Mapping[str, Any]]
    block: str
    parts: Mapping[str, str]
    has_shared: bool = False


MIXTRAL = _Family("mixtral", "MixtralForCausalLM", ("num_local_experts", None, {}), "block_sparse_moe", MLP)
QWEN = _Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ("num_experts", "moe_intermediate_size", {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "mlp",
    {name: name for name in MLP},
)
QWEN2 = _Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    QWEN.settings,
    "mlp",
    QWEN.parts,
    has_shared=True,
)
FAMILIES = {"llama": MIXTRAL, "mistral": MIXTRAL, "qwen3": QWEN}
"""Mixtures without a shared expert, by the model type of the dense networks."""
SHARING = {"llama": QWEN2, "mistral": QWEN2, "qwen2": QWEN2}
"""Mixtures with a shared expert, by the model type of the dense networks."""
BIASES = ("q_proj", "k_proj", "v_proj")
"""Attention layers that have biases in Qwen2-MoE."""


@dataclass(frozen=True)
class Expert:
    """A dense network whose MLPs become experts, with the prompts that should be routed to it.

    Attributes:
        path: The folder of the network.
        prompts: Prompts that should be routed to the expert.
        against: Prompts that should not be routed to the expert. The mean of their vectors is subtracted.
        noise_scale: The standard deviation of the normal noise that is added to the expert's matrices.
        residual_scale: The factor by which the expert's last matrix is multiplied. The last matrix writes the expert's
            output to the residual stream.
    """

    path: str | Path
    prompts: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    noise_scale: float = 0.0
    residual_scale: float = 1.0

    def take(self, tensor: Tensor, part: str, generator: torch.Generator | None) -> Tensor:
        """Return one of the expert's matrices in the form in which the mixture stores this matrix."""
        if self.noise_scale:
            tensor = tensor + self.noise_scale * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return tensor * self.residual_scale if part == "down_proj" and self.residual_scale != 1 else tensor


@dataclass(frozen=True)
class AssembledMixture:
    """The result of assembling a mixture.

    Attributes:
        path: The folder of the mixture.
        experts: The number of experts.
        chosen: The number of experts that process each token.
        conditions: The condition number of the router of each layer.
        shared: The expert that processes every token; None without such an expert.
    """

    path: Path
    experts: int
    chosen: int
    conditions: tuple[float, ...]
    shared: Expert | None = None

    def __str__(self) -> str:
        alike = sum(not one <= ALIKE for one in self.conditions)
        said = (
            f"; in {alike} of {len(self.conditions)} layers, some are hardly used, because their prompts are similar"
            if alike
            else ""
        )
        shared = "" if self.shared is None else " and one shared expert"
        return f"{self.experts} experts in every layer, {self.chosen} for every token{shared}{said}"


@check_arguments
def assemble_mixture(
    base: str | Path,
    experts: Sequence[Expert | str | Path],
    out: Output | str | Path,
    *,
    router: Router = "hidden",
    chosen: int = 2,
    shared: Expert | str | Path | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
) -> AssembledMixture:
    """Assemble a mixture of experts from dense networks of equal shapes. Only MLPs come from the experts.

    All other tensors come from the base. Llama and Mistral networks become a Mixtral, and Qwen3 networks become a
    Qwen3-MoE. If there is a shared expert, Llama, Mistral and Qwen2 networks become a Qwen2-MoE. The router weights of
    a token's chosen experts sum to one. Therefore a mixture of equal experts computes the same function as the dense
    network, for any routers. The output of a shared expert is multiplied by a gate between 0 and 1 and added for every
    token. The rows of a router are unit vectors, one for each expert:

    - `hidden`: the residual stream of the base before the layer, at the last token of a prompt, averaged over prompts;
    - `hidden_avg`: the residual stream of the base before the layer, averaged over the tokens of each prompt, and then
      over prompts;
    - `cheap_embed`: the sum of the token embeddings of all prompts, which is the same for all layers;
    - `random`: normally distributed numbers; `uniform_random`: numbers as in a new linear layer, in [-1, 1] /
      sqrt(width). The rows of `random` and `uniform_random` are not scaled to unit length.

    For prompts in `against`, vectors are computed in the same way and subtracted before the rows are scaled. Tensors
    are read and written one at a time. The experts' residual streams must have the coordinates of the base. Fine-tunes
    of the base have the coordinates of the base; align other networks to the base first. Experts may have different
    permutations of their hidden units.

    Args:
        base: The folder of the base, which provides embeddings, attention, norms and tokenizer.
        experts: Folders of networks of the same shape. Prompts are required if routers are computed from prompts.
        out: The folder of the mixture.
        router: The method that initializes routers, one of the methods above.
        chosen: The number of experts that process each token.
        shared: An expert that processes every token. The gate of the shared expert is initialized in the same way as
            the rows of a router.
        generator: The source of randomness for random routers and for noise.
        progress: A function that shows the tensors as they are processed.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        ValueError: The networks belong to no family that has mixtures, or differ in shapes. There are fewer experts
            than `chosen`. Prompts or a generator are missing.

    References:
        Komatsuzaki et al. (2023), Sparse upcycling, section 2 (copies of one MLP, random routers); Goddard et al.
        (2024), mergekit, the documentation of mergekit-moe. Unlike mergekit-moe, this function reads each prompt
        separately, without padding, and in the dtype of the base.
    """
    given = [*experts, *([] if shared is None else [shared])]
    rows = [one if isinstance(one, Expert) else Expert(one) for one in given]
    place, config = Output.of(out), read_object(Path(base) / "config.json")
    inputs = (Input("base", str(base)), *(Input(f"expert{k}", str(one.path)) for k, one in enumerate(rows)))
    provenance = Provenance("rg.merging.assemble_mixture", {"router": router, "chosen": chosen}, inputs)
    require_new_folder(place, "a mixture")
    family = _family(base, config, has_shared=shared is not None)
    if any(one.noise_scale for one in rows) and generator is None:
        raise ValueError("noise on experts needs random numbers; give a torch.Generator as `generator`")
    if not 1 <= chosen <= len(experts):
        raise ValueError(f"every token chooses {chosen} of {len(experts)} experts; give a number from one to all")
    first, others = Checkpoint.open(base), [Checkpoint.open(one.path) for one in rows]
    for other, row in zip(others, rows, strict=True):
        _require_alike(first, other, config, read_object(Path(row.path) / "config.json"))
    layers = int(config["num_hidden_layers"])
    routers = _make_routers(base, config, rows, router, generator)
    kept = first.stored[EMBEDDING].dtype
    sources: dict[str, tuple[Checkpoint, str, Expert | None] | Tensor] = {}
    for name in first.stored:
        owner, _, part = name.removesuffix(".weight").rpartition(".")
        if not owner.endswith(".mlp"):
            sources[name] = first, name, None
            if family.has_shared and part in BIASES and f"{owner}.{part}.bias" not in first.stored:
                sources[f"{owner}.{part}.bias"] = torch.zeros(first.stored[name].shape[0], dtype=kept)
            continue
        block = f"{owner.removesuffix('.mlp')}.{family.block}"
        for k, other in enumerate(others):
            own = f"experts.{k}" if k < len(experts) else "shared_expert"
            sources[f"{block}.{own}.{family.parts[part]}.weight"] = other, name, rows[k]
    for k in range(layers):
        gates = {"gate": routers[k, : len(experts)], "shared_expert_gate": routers[k, len(experts) :]}
        for gate, tensor in gates.items():
            if len(tensor):
                name = f"model.layers.{k}.{family.block}.{gate}.weight"
                sources[name] = round_to(tensor, kept, f"the router of layer {k}")
    specs = []
    for name, source in sources.items():
        like = source if isinstance(source, Tensor) else first.stored[source[1]]
        specs.append(TensorSpec(name, tuple(like.shape), like.dtype))
    shards = place.form.layout([Shard("model.safetensors", tuple(specs), {"format": "pt"})], "model")
    settings: Any = {"resume": place.resume, "overwrite": place.overwrite, "nbytes": sum(one.nbytes for one in shards)}

    def pieces(name: str) -> Any:
        source = sources[name]
        if isinstance(source, Tensor):
            yield source
            return
        tensor, expert = source[0].read(source[1]), source[2]
        yield tensor if expert is None else expert.take(tensor, source[1].split(".")[-2], generator)

    with Staging(place.path, None, provenance=place.provenance or provenance, **settings) as staging:
        staging.write(shards, pieces, progress)
        described = json.dumps(_describe(config, family, len(experts), chosen), indent=2, ensure_ascii=False) + "\n"
        staging.beside["config.json"] = place.form.describe(described.encode(), Path(base) / "config.json")
        staging.publish(shards, first)
    conditions = tuple(float(torch.linalg.cond(one.double())) for one in routers[:, : len(experts)])
    return AssembledMixture(place.path, len(experts), chosen, conditions, None if shared is None else rows[-1])


def _family(base: str | Path, config: Mapping[str, Any], *, has_shared: bool) -> _Family:
    """Return the family of mixtures that a dense network can form."""
    known = SHARING if has_shared else FAMILIES
    family = known.get(str(config.get("model_type")))
    if family is None:
        kind = "mixtures with a shared expert" if has_shared else "mixtures"
        found = config.get("model_type")
        raise ValueError(
            f"{str(base)!r} is of type {found!r}; {kind} can be made of {', '.join(known)}; give such networks"
        )
    lacking = [key for key in NOT_IN_MIXTURES if config.get(key)]
    if lacking:
        raise ValueError(f"{str(base)!r} has {shorten(lacking)}, unlike any {family.model}; give networks without it")
    return family


def _require_alike(base: Checkpoint, expert: Checkpoint, config: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise an error unless an expert has the tensors of the base and computes its MLPs in the same way."""
    ours, theirs = ({name: tuple(one.shape) for name, one in each.stored.items()} for each in (base, expert))
    far = [name for name in ours if ".mlp." in name and theirs.get(name) != ours[name]]
    if far:
        raise ValueError(
            f"{expert.label!r} lacks {shorten(far)}, or has another shape there than {base.label!r}; give networks of "
            "one shape"
        )
    for key in ("model_type", "hidden_act", "rms_norm_eps"):
        if config.get(key) != other.get(key):
            raise ValueError(
                f"{expert.label!r} has {key} {other.get(key)!r}, but {base.label!r} has {config.get(key)!r}; all "
                "experts must have the same value: give networks of one shape"
            )


def _describe(config: Mapping[str, Any], family: _Family, experts: int, chosen: int) -> dict[str, Any]:
    """Return the configuration of the mixture."""
    count, width, others = family.settings
    return {
        **config,
        "model_type": family.model,
        "architectures": [family.architecture],
        count: experts,
        "num_experts_per_tok": chosen,
        **({} if width is None else {width: config["intermediate_size"]}),
        **(_describe_shared(config) if family.has_shared else {}),
        **others,
    }


def _describe_shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a mixture with a shared expert; all layers get the sliding window of a Mistral base."""
    window = config.get("sliding_window") if config["model_type"] == "mistral" else None
    return {
        "shared_expert_intermediate_size": config["intermediate_size"],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [f"{'full' if window is None else 'sliding'}_attention"] * int(config["num_hidden_layers"]),
    }


def _make_routers(
    base: str | Path,
    config: Mapping[str, Any],
    experts: Sequence[Expert],
    router: Router,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the routers as one tensor `[layer, expert, width]`."""
    shape = int(config["num_hidden_layers"]), len(experts), int(config["hidden_size"])
    if router in ("random", "uniform_random"):
        if generator is None:
            raise ValueError(f"the router {router!r} needs random numbers; give a torch.Generator as `generator`")
        if router == "random":
            return torch.randn(shape, generator=generator)
        drawn: Tensor = (2 * torch.rand(shape, generator=generator) - 1) / shape[2] ** 0.5
        return drawn
    silent = [str(one.path) for one in experts if not one.prompts]
    if silent:
        raise ValueError(
            f"the router {router!r} is made of prompts, but {shorten(silent)} has none; give an Expert with prompts, "
            "or a random router"
        )
    if len(experts) > 1 and len({(one.prompts, one.against) for one in experts}) == 1:
        raise ValueError("all experts have the same prompts, so a router cannot choose; give each expert other prompts")
    measure = _measure(base, router)
    rows = []
    for one in experts:
        row = measure(one.prompts) - (measure(one.against) if one.against else 0.0)
        rows.append(row / row.norm(dim=-1, keepdim=True).clamp(min=1e-8))
    return torch.stack(rows, 1).expand(*shape)


def _measure(base: str | Path, router: Router) -> Callable[[Sequence[str]], Tensor]:
    """Return a function from prompts to one vector per layer, `[layer, width]`, or one vector for all layers, in
    float32.
    """
    if router == "cheap_embed":
        read, embedding = open_tokens(base), Checkpoint.open(base).read(EMBEDDING, dtype=torch.float32)
        return lambda prompts: torch.stack([embedding[read(one)[0]].sum(0) for one in prompts]).sum(0, keepdim=True)
    run = open_streams(base)

    def average(prompts: Sequence[str]) -> Tensor:
        streams = [run(one) for one in prompts]
        return torch.stack([one[:, -1] if router == "hidden" else one.mean(1) for one in streams]).mean(0)

    return average
