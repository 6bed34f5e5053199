"""Which transformations of a model's parameters leave its function unchanged?"""

from regauge.discover.discover import discover
from regauge.discover.registry import register_rule

__all__ = ["discover", "register_rule"]
