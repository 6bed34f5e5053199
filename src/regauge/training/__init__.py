"""Training: descent on a loss, with plain and stacked parameters; schedules, optimizers, initializations."""

from regauge.training.clock import Clock
from regauge.training.descent import Descent, Minimum, PlainProgram, Program, State, descend, differentiate, minimize
from regauge.training.net_program import NetProgram
from regauge.training.optimizers import SGD, Adam, AdamW, Optimizer
from regauge.training.schedules import Constant, Cosine, OneCycle, Schedule, StepDecay
from regauge.training.stacks import fit_signals

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Clock",
    "Constant",
    "Cosine",
    "Descent",
    "Minimum",
    "NetProgram",
    "OneCycle",
    "Optimizer",
    "PlainProgram",
    "Program",
    "Schedule",
    "State",
    "StepDecay",
    "descend",
    "differentiate",
    "fit_signals",
    "minimize",
]
