"""Mean-field variational inference, and how much of a network its posteriors use."""

from regauge.bayes.variational.diagnostics import Diagnostics, diagnose
from regauge.bayes.variational.training import Variational, fit

__all__ = ["Diagnostics", "Variational", "diagnose", "fit"]
