from .coupling import Coupling as Coupling
from .fitting import divide as divide
from .fitting import fit as fit
from .flow import Flow as Flow
from .flow_config import FlowConfig as FlowConfig
from .flow_files import load_flow as load_flow
from .guiding import BatchLoss as BatchLoss
from .judgement import Judgement as Judgement
from .judging import judge as judge
from .nets import Metanetwork as Metanetwork
from .nets import Perceptron as Perceptron
from .nets import Tokens as Tokens
from .priors import PRIORS as PRIORS
from .priors import FullGaussian as FullGaussian
from .priors import MatchedGaussian as MatchedGaussian
from .priors import PlainGaussian as PlainGaussian
from .priors import UniformSphere as UniformSphere
from .representation import Representation as Representation
from .sampling import Guidance as Guidance
from .space import Space as Space
from .store_judging import judge_store as judge_store
from .stored_samples import sample_store as sample_store
from .thesis import thesis_config as thesis_config
from .times import BetaTime as BetaTime
from .times import UniformTime as UniformTime

Config = FlowConfig
