"""The table of merge rules, used by the command line, recipes, docs and tests. The module imports no large packages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.merging.rule import Rule


@dataclass(frozen=True)
class RuleRow:
    """A row of the table of merge rules: the class of a rule, and its defaults.

    Attributes:
        name: The name of the rule's class, such as KarcherMean. The file in `merging.rules` is named in lower case,
            such as karcher_mean.
        then: The class of the rule that combines the reduced task vectors, for rules that keep some entries of each
            task vector.
        defaults: Settings whose defaults differ from those of the classes.
        help: The effect of the rule, in a few words.
    """

    name: str
    help: str
    then: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> "tuple[type[Rule], ...]":
        """Return the class of the rule, and the class in `then` if it is given."""
        names = [self.name, *([] if self.then is None else [self.then])]
        return tuple(getattr(import_module(f"regauge.merging.rules.{_file_of(name)}"), name) for name in names)

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings that `build` accepts."""
        return tuple(dict.fromkeys(name for kind in self.classes for name in _settings(kind)))

    def read(self, texts: "Mapping[str, str | Sequence[str]]", **settings: Any) -> "Rule":
        """Build the rule from settings in text form, such as `{"density": ["0.5", "mlp=0.5/0.3"]}`."""
        from regauge.merging.settings import read_number, read_numbers

        given = {name: read_number(one) if isinstance(one, str) else read_numbers(one) for name, one in texts.items()}
        return self.build(**given, **settings)

    def build(self, **settings: Any) -> "Rule":
        """Return the rule with these settings, passing each setting to the class that has it.

        Raises:
            ValueError: The rule has no such setting, or the value of a setting is invalid.
        """
        unknown = sorted(set(settings) - set(self.settings))
        if unknown:
            known = ", ".join(self.settings) or "none"
            raise ValueError(f"{self.name} has no setting {', '.join(map(repr, unknown))}; it has: {known}")
        rest = {**self.defaults, **settings}
        built: dict[str, Any] = {}
        for kind in reversed(self.classes):
            names = [name for name in _settings(kind) if name in rest]
            built = {"rule": kind(**built, **{name: rest.pop(name) for name in names})}
        rule: Rule = built["rule"]
        return rule


RULES = {
    "average": RuleRow("Average", "the weighted mean"),
    "greedy": RuleRow("GreedySoup", "the mean of those that do not raise the loss on DATA"),
    "sum": RuleRow("WeightedSum", "the sum with the weights as they are"),
    "passthrough": RuleRow("Passthrough", "one network as it is, or multiplied"),
    "slerp": RuleRow("Slerp", "two networks, or their task vectors, along the arc between them"),
    "karcher": RuleRow("KarcherMean", "the mean of directions and lengths on the sphere"),
    "multislerp": RuleRow("KarcherMean", "the same without iterations", defaults={"steps": 0}),
    "task-arithmetic": RuleRow("TaskArithmetic", "the sum of task vectors"),
    "ties": RuleRow("Ties", "the largest entries of task vectors, the mean of what agrees in sign"),
    "dare": RuleRow("Dare", "task vectors without entries dropped at random, summed", then="TaskArithmetic"),
    "dare-ties": RuleRow(
        "Dare",
        "the same, the mean of what agrees in sign",
        then="Ties",
        defaults={"density": 1.0},
    ),
    "della": RuleRow(
        "Della",
        "task vectors without entries dropped at random, small ones more often, the mean of what agrees in sign",
        then="ElectedMean",
    ),
    "della-linear": RuleRow("Della", "the same, summed", then="TaskArithmetic"),
    "breadcrumbs": RuleRow(
        "Breadcrumbs",
        "task vectors without their largest and smallest entries, summed",
        then="TaskArithmetic",
    ),
    "breadcrumbs-ties": RuleRow(
        "Breadcrumbs",
        "the same, the mean of what agrees in sign",
        then="ElectedMean",
    ),
    "model-stock": RuleRow("ModelStock", "a share of the mean task vector that follows from their angles"),
    "sce": RuleRow("Sce", "the entries that vary most, by the sizes of task vectors, the mean of what agrees in sign"),
    "nearswap": RuleRow("NearSwap", "a base moved towards one network, by no more than a reach"),
    "ram": RuleRow("Ram", "what one network alone changes, and the mean of what several change"),
    "arcee-fusion": RuleRow("ArceeFusion", "one network with the most important entries of another one"),
}
"""Every rule, by its name on the command line."""


def _settings(kind: "type[Rule]") -> list[str]:
    return [one.name for one in fields(kind) if one.name != "rule"]  # type: ignore[arg-type]  # Rules are dataclasses.


def _file_of(name: str) -> str:
    """Return the module name of a rule's class, such as karcher_mean for KarcherMean."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
