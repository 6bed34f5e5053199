from .descent import PlainProgram as PlainProgram
from .descent import Program as Program
from .descent import State as State
from .descent import descend as descend
from .descent import differentiate as differentiate
from .descent import minimize as minimize
from .initialization import Initialization as Initialization
from .optimizers import SGD as SGD
from .optimizers import Adam as Adam
from .optimizers import AdamW as AdamW
from .optimizers import Optimizer as Optimizer
from .schedules import Constant as Constant
from .schedules import Cosine as Cosine
from .schedules import OneCycle as OneCycle
from .schedules import Schedule as Schedule
from .schedules import StepDecay as StepDecay
from .settings import Choice as Choice
from .settings import LogUniform as LogUniform
from .settings import Uniform as Uniform
from .stacks import fit_signals as fit_signals
from .threads import one_thread as one_thread
from .training_configs import DescentConfig as DescentConfig

Descent = DescentConfig
