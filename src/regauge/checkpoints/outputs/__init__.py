"""New checkpoints, with further files and provenance: written next to their place, and put there whole."""
