"""New checkpoints: written beside their place, with what goes along, their origin, and put there whole."""
