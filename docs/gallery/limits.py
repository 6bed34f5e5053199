"""When it fails: the barrier by width, depth and length of training, drawn from records of 75 pairs of networks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import when_it_fails

when_it_fails.PICTURE = Path(sys.argv[1]) / "limits.png"
when_it_fails.draw(when_it_fails.read())
