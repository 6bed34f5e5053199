"""The table of operator rules.

A rule receives the builder and the call, and returns a value for each tensor that the operator returns. It composes
the builder's primitives, each of which is sound. To add a rule, write a function in the file of its subject, name it
in that file's RULES, and add a case to `tests/rule_cases.py`.
"""

from regauge.discovery.operators import Rule
from regauge.discovery.rules import (
    distances,
    elementwise,
    indexed_writes,
    indexing,
    layers,
    linear_maps,
    norms,
    reductions,
    resampling,
    shape,
)

SUBJECTS = (elementwise, shape, linear_maps, reductions, distances, resampling, norms, indexing, indexed_writes, layers)
RULES: dict[str, Rule] = {name: rule for subject in SUBJECTS for name, rule in subject.RULES.items()}
