"""The base class of rules for task vectors, the differences of networks from a base."""

from regauge.merging.rule import Rule


class VectorRule(Rule):
    """A rule that needs a base; already one task vector makes sense."""

    base, least, has_shares = "needed", 1, False
