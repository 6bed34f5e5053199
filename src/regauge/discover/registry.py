"""Rules that users add."""

from regauge.discover.call import Rule

_RULES: dict[str, Rule] = {}


def register_rule(name: str, rule: Rule) -> None:
    _RULES[name] = rule


def registered_rules() -> dict[str, Rule]:
    return dict(_RULES)
