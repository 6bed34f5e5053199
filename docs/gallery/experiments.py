"""Networks seen as images and shapes, from three experiments of the papers; these take hours, and seconds in small."""

import shutil
import sys
import tempfile
from pathlib import Path

from regauge.cli.main import main

folder, scale, shape = Path(sys.argv[1]), "cpu", "bunny"
if "--quick" in sys.argv:
    scale, shape = "smoke", "ball"
pictures = {
    "paths": ("002", "interpolation", "paths"),
    "pruned-shapes": ("003", "pruned-512", "shares"),
    "strips": ("003", "reconstructions", shape),
}
for name, (paper, experiment, picture) in pictures.items():
    with tempfile.TemporaryDirectory() as made:
        main(["reproduce", paper, experiment, "--scale", scale, "--out", made])
        shutil.copy(Path(made) / f"{paper}-{experiment}-{scale}-{picture}.png", folder / f"{name}.png")
