"""The table of merge rules, for the command line, recipes, docs and tests. This module imports no large packages."""

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
        """Return the rule with the given settings, passing each setting to the class that has it.

        Raises:
            ValueError: The rule has no setting of a given name, or the value of a setting is invalid.
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
    "greedy": RuleRow("GreedySoup", "the mean of the checkpoints that do not raise the loss on DATA"),
    "sum": RuleRow("WeightedSum", "the weighted sum"),
    "passthrough": RuleRow("Passthrough", "one network, unchanged or multiplied by a factor"),
    "slerp": RuleRow("Slerp", "two networks, or their task vectors, interpolated along the arc between them"),
    "karcher": RuleRow("KarcherMean", "the mean of the directions on the sphere, with the mean length"),
    "multislerp": RuleRow("KarcherMean", "the same without iterations", defaults={"steps": 0}),
    "task-arithmetic": RuleRow("TaskArithmetic", "the sum of task vectors"),
    "ties": RuleRow("Ties", "the mean of the largest entries of task vectors that agree with the elected sign"),
    "dare": RuleRow("Dare", "the sum of task vectors after dropping random entries", then="TaskArithmetic"),
    "dare-ties": RuleRow(
        "Dare",
        "the same, but the mean of the entries that agree with the elected sign",
        then="Ties",
        defaults={"density": 1.0},
    ),
    "della": RuleRow(
        "Della",
        "as dare-ties, but small entries are dropped more often",
        then="ElectedMean",
    ),
    "della-linear": RuleRow("Della", "as della, but summed", then="TaskArithmetic"),
    "breadcrumbs": RuleRow(
        "Breadcrumbs",
        "the sum of task vectors without their largest and smallest entries",
        then="TaskArithmetic",
    ),
    "breadcrumbs-ties": RuleRow(
        "Breadcrumbs",
        "the same, but the mean of the entries that agree with the elected sign",
        then="ElectedMean",
    ),
    "model-stock": RuleRow("ModelStock", "the mean task vector, shortened depending on the angles of task vectors"),
    "sce": RuleRow("Sce", "the mean, weighted by size, of the entries that vary most and agree in sign"),
    "nearswap": RuleRow("NearSwap", "the base, moved toward one network by at most the reach in each entry"),
    "ram": RuleRow("Ram", "entries that one network changes are kept, and entries that several change are averaged"),
    "arcee-fusion": RuleRow("ArceeFusion", "one network, with the most important entries of another network"),
}
"""Every rule, by its name on the command line."""


def _settings(kind: "type[Rule]") -> list[str]:
    return [one.name for one in fields(kind) if one.name != "rule"]  # type: ignore[arg-type]  # Rules are dataclasses.


def _file_of(name: str) -> str:
    """Return the module name of a rule's class, such as karcher_mean for KarcherMean."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
