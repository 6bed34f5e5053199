from .classification import ClassifierConfig as ClassifierConfig
from .classification import initialize as initialize
from .classification import split_batches as split_batches
from .classification import train as train
from .cnn import CNN as CNN
from .mlp import MLP as MLP
from .mlp import ResidualMLP as ResidualMLP
from .mlp import mlp as mlp
from .resnet import ResNet as ResNet
from .resnet import resnet20 as resnet20
from .siren import Siren as Siren
from .transformer import GPT as GPT
from .transformer import Llama as Llama
from .transformer import ViT as ViT
from .transformer import initialize_transformer as initialize_transformer
from .vgg import VGG as VGG

Training = ClassifierConfig
