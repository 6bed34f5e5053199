from .autoencoder import Autoencoder as Autoencoder
from .autoencoder import LatentPath as LatentPath
from .autoencoder import load_autoencoder as load_autoencoder
from .autoencoder_training import fit_autoencoder as fit_autoencoder
from .function_losses import Distillation as Distillation
from .function_losses import SquaredError as SquaredError
from .hyper_matching import HyperMatchingConfig as HyperMatchingConfig
from .hyper_matching import hyper_match as hyper_match
from .learn_configs import AutoencoderConfig as AutoencoderConfig
from .learn_configs import MatchingConfig as MatchingConfig
from .learn_configs import PredictorConfig as PredictorConfig
from .learned_matching import LearnedMatching as LearnedMatching
from .learned_matching import load_matching as load_matching
from .matching_training import fit_matching as fit_matching
from .predictor import Predictor as Predictor
from .predictor import load_predictor as load_predictor
from .predictor_training import fit_predictor as fit_predictor
from .random_changes import Dropout as Dropout
from .random_changes import Noise as Noise
from .random_changes import Pruning as Pruning
from .random_changes import Rotation as Rotation
from .random_changes import Scaling as Scaling
from .random_changes import Translation as Translation
from .rendering import grid as grid

HyperMatching = HyperMatchingConfig
