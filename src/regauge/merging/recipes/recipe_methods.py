"""The merge methods in recipes: the rule of regauge, the parameters and the defaults for each method."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RecipeMethod:
    """A merge method in recipes.

    Attributes:
        rule: The name of the rule in `merging.table`.
        base: Whether a base is "needed", "optional" or not possible ("none"); "member" if the base is one of the
            models.
        own: Parameters that each model sets separately, with their defaults; None if the parameter is required.
        common: Parameters shared by all models, with their defaults.
        least: The smallest number of models. A base counts only if it is one of the models.
        most: The largest number of models; `math.inf` for no limit.
    """

    rule: str
    base: Literal["none", "needed", "optional", "member"]
    own: Mapping[str, float | None] = field(default_factory=dict)
    common: Mapping[str, float | None] = field(default_factory=dict)
    least: int = 2
    most: float = math.inf

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters."""
        return tuple(dict.fromkeys([*self.own, *self.common]))


VECTORS: Mapping[str, float | None] = {"lambda": 1.0, "normalize": 0.0, "rescale": 0.0, "int8_mask": 0.0}
TRIMMED: Mapping[str, float | None] = {**VECTORS, "rescale_norm": 1.0}
WEIGHT: Mapping[str, float | None] = {"weight": None}
SPARSE: Mapping[str, float | None] = {"weight": None, "density": 1.0}
RANDOM: Mapping[str, float | None] = {**VECTORS, "rescale": 1.0}
NUSLERP: Mapping[str, float | None] = {"nuslerp_flatten": 1.0, "nuslerp_row_wise": 0.0}
RAM: Mapping[str, float | None] = {"epsilon": 1e-5}
MULTISLERP: Mapping[str, float | None] = {"normalize_weights": 1.0, "eps": 1e-8}

METHODS: Mapping[str, RecipeMethod] = {
    "linear": RecipeMethod("sum", "none", WEIGHT, {"normalize": 1.0}, least=1),
    "slerp": RecipeMethod("slerp", "member", {}, {"t": None}, most=2),
    "nuslerp": RecipeMethod("slerp", "optional", WEIGHT, NUSLERP, most=2),
    "multislerp": RecipeMethod("multislerp", "optional", WEIGHT, MULTISLERP),
    "karcher": RecipeMethod("karcher", "none", {}, {"max_iter": 10.0, "tol": 1e-5}),
    "task_arithmetic": RecipeMethod("task-arithmetic", "needed", WEIGHT, VECTORS, least=1),
    "ties": RecipeMethod("ties", "needed", SPARSE, {**TRIMMED, "normalize": 1.0}, least=1),
    "dare_linear": RecipeMethod("dare", "needed", SPARSE, RANDOM, least=1),
    "dare_ties": RecipeMethod("dare-ties", "needed", SPARSE, RANDOM, least=1),
    "della": RecipeMethod("della", "needed", {**SPARSE, "epsilon": 0.15}, {**RANDOM, "normalize": 1.0}, least=1),
    "della_linear": RecipeMethod("della-linear", "needed", {**SPARSE, "epsilon": 0.15}, RANDOM, least=1),
    "breadcrumbs": RecipeMethod("breadcrumbs", "needed", {**SPARSE, "gamma": 0.01}, TRIMMED, least=1),
    "breadcrumbs_ties": RecipeMethod("breadcrumbs-ties", "needed", {**SPARSE, "gamma": 0.01}, TRIMMED, least=1),
    "model_stock": RecipeMethod("model-stock", "needed", {}, {"filter_wise": 0.0}),
    "sce": RecipeMethod("sce", "needed", {}, {"select_topk": 1.0, "int8_mask": 0.0}, least=1),
    "nearswap": RecipeMethod("nearswap", "needed", {}, {"t": None}, least=1, most=1),
    "arcee_fusion": RecipeMethod("arcee-fusion", "member", most=2),
    "ram": RecipeMethod("ram", "needed", {}, RAM, least=1),
    "ramplus_tl": RecipeMethod("ram", "needed", {}, {**RAM, "r": 0.1, "alpha": 0.2}, least=1),
    "passthrough": RecipeMethod("passthrough", "none", {"scale": 1.0}, least=1, most=1),
}
"""Every method by its name in mergekit, with mergekit's defaults."""

NORMS = {"l1": 1.0, "l2": 2.0, "linf": math.inf}
"""Norms of a task vector that a rule can restore after it drops entries, by their names in recipes."""

SINGLE = ("slerp", "nuslerp", "multislerp", "karcher", "arcee_fusion")
"""Methods that copy a slice of a single model unchanged."""

IDLE = {
    "int8_mask": "int8_mask changes nothing here: masks are not kept",
    "eps": "eps changes nothing here: it is added to no length, and a tensor of zeros has no direction",
    "residual_weight": "residual_weight changes nothing, as in mergekit 0.1.5, which reads it and does nothing with it",
}
"""Parameters of mergekit that have no effect in regauge, each with the text of a note."""
