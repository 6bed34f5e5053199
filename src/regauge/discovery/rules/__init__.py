"""The table of rules for operators of a traced program.

A rule receives the builder and the call of the operator. The rule returns one value for each tensor that the operator
returns. A rule composes primitives of the builder, which never allow a wrong transformation. To add a rule, write a
function in the file for its topic, add the function to the RULES of this file, and add a case to `tests/rule_cases.py`.
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
