"""Training of populations: one program for many networks."""

from regauge.storage.architecture import Architecture
from regauge.storage.store import Store
from regauge.training.initialization import Initialization
from regauge.training.optimizers import SGD, Adam, AdamW
from regauge.training.programs import Backend
from regauge.training.schedules import Constant, Cosine, OneCycle, StepDecay
from regauge.training.settings import Choice, LogUniform, Uniform
from regauge.zoo.training.config import Checkpoints, ClassHalves, Config, Discard, Fraction
from regauge.zoo.training.examples import SETS, Examples, load_examples
from regauge.zoo.training.stack_state import Block
from regauge.zoo.training.trainer import train

__all__ = [
    "SETS",
    "SGD",
    "Adam",
    "AdamW",
    "Architecture",
    "Backend",
    "Block",
    "Checkpoints",
    "Choice",
    "ClassHalves",
    "Config",
    "Constant",
    "Cosine",
    "Discard",
    "Examples",
    "Fraction",
    "Initialization",
    "LogUniform",
    "OneCycle",
    "StepDecay",
    "Store",
    "Uniform",
    "load_examples",
    "train",
]
