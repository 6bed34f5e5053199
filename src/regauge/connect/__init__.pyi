from .line import Curve as Curve
from .line import line as line
from .paths import Bezier as Bezier
from .paths import Geodesic as Geodesic
from .paths import Path as Path
from .paths import PolygonalChain as PolygonalChain
from .paths import PreparedPath as PreparedPath
from .paths import Repaired as Repaired
from .paths import Straight as Straight
from .paths import WassersteinGeodesic as WassersteinGeodesic
from .paths import combine as combine
from .paths import interpolate as interpolate
from .plane import Plane as Plane
from .plane import plane as plane
from .repair import prepare_statistics as prepare_statistics
from .repair import repair as repair
from .repair import reset_batchnorm as reset_batchnorm
from .repair import variance_collapse as variance_collapse
from .straighten import StraightenConfig as StraightenConfig
from .straighten import straighten as straighten
from .straighten import train_path as train_path

Straighten = StraightenConfig
