"""A reader of recipes for mixtures of experts, which are YAML files in the format of mergekit-moe."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from regauge.checkpoints.yaml_files import compose_yaml
from regauge.merging.assemble_mixture import FAMILIES, SHARING, Expert, Router
from regauge.merging.recipes.read_recipe import Entry, read_dtype, read_folder

KEYS = ("base_model", "experts", "gate_mode", "dtype", "experts_per_token", "shared_experts", "architecture")
EXPERT = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale")
MODES: dict[str, Router] = {"hidden_last": "hidden", **{one: one for one in get_args(Router)}}
"""Methods of initializing routers, by their names in recipes."""
ARCHITECTURES = {"mixtral": (FAMILIES, "mixtral"), "qwen": (SHARING, "qwen2_moe"), "qwen3": (FAMILIES, "qwen3_moe")}
"""Architectures that a recipe may request, each with the families of dense networks from which it can be assembled, and
with its model type."""


@dataclass(frozen=True)
class MixtureRecipe:
    """The content of a recipe for a mixture.

    Attributes:
        path: The file of the recipe.
        base: The folder of the base.
        experts: The experts.
        shared: The expert that processes every token; None without such an expert.
        router: The method that initializes routers.
        chosen: The number of experts that the router chooses for each token.
        dtype: The dtype of the result; by default the dtype of the base.
    """

    path: Path
    base: Path
    experts: tuple[Expert, ...]
    shared: Expert | None
    router: Router
    chosen: int
    dtype: str | None


def read_mixture(path: Path) -> MixtureRecipe | None:
    """Read a recipe for a mixture; return None if the file is another kind of recipe or cannot be read.

    Raises:
        RecipeError: An entry of the recipe is unknown or invalid.
    """
    try:
        node = compose_yaml(path) if path.is_file() else None
    except ValueError:
        return None
    whole = None if node is None else Entry(path, "the recipe", node)
    if whole is None or not whole.is_mapping or "experts" not in whole.mapping():
        return None
    top = whole.mapping(KEYS, ["base_model"])
    mode = top["gate_mode"].text if "gate_mode" in top else "hidden"
    if mode not in MODES:
        raise top["gate_mode"].refuse(f"'gate_mode' is {mode!r}; choose from {', '.join(MODES)}")
    shared = [_expert(one) for one in top["shared_experts"].items] if "shared_experts" in top else []
    if len(shared) > 1:
        raise top["shared_experts"].refuse(f"there are {len(shared)} shared experts; a mixture has at most one")
    if "architecture" in top:
        _require_architecture(top["architecture"], has_shared=bool(shared))
    return MixtureRecipe(
        path,
        read_folder(top["base_model"]),
        tuple(_expert(one) for one in top["experts"].items),
        shared[0] if shared else None,
        MODES[mode],
        top["experts_per_token"].whole if "experts_per_token" in top else 2,
        read_dtype(top.get("dtype")),
    )


def _expert(entry: Entry) -> Expert:
    found = entry.mapping(EXPERT, ["source_model"])
    prompts, against = (
        tuple(one.text for one in found[key].items) if key in found else ()
        for key in ("positive_prompts", "negative_prompts")
    )
    scales = {key: found[key].number for key in ("noise_scale", "residual_scale") if key in found}
    return Expert(read_folder(found["source_model"]), prompts, against, **scales)


def _require_architecture(entry: Entry, *, has_shared: bool) -> None:
    """Raise an error if an architecture does not allow a shared expert, or requires one that is missing."""
    name = entry.text
    if name not in ARCHITECTURES:
        raise entry.refuse(f"the architecture {name!r} is not supported; choose from {', '.join(ARCHITECTURES)}")
    families, kind = ARCHITECTURES[name]
    if (families is SHARING) != has_shared:
        needs = "has no shared expert" if has_shared else "needs one shared expert: name it under 'shared_experts'"
        raise entry.refuse(f"a mixture of the architecture {name!r} ({kind}) {needs}")
