from .images import ImageData as ImageData
from .images import cifar10 as cifar10
from .images import digits as digits
from .images import fashion_mnist as fashion_mnist
from .images import mnist as mnist
from .packaged import breast_cancer as breast_cancer
from .packaged import help_topics as help_topics
from .shapes import voxels as voxels
