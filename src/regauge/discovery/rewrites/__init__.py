"""Changes of parameters that leave the function unchanged, after which rotations are possible."""
