from .canonicalize import canonical_element as canonical_element
from .canonicalize import canonicalize as canonicalize
from .canonicalize import factorize as factorize
from .canonicalize import normalize_logits as normalize_logits
from .canonicalize import orbit_distance as orbit_distance
from .spheres import Manifold as Manifold
from .spheres import canonical_manifold as canonical_manifold
