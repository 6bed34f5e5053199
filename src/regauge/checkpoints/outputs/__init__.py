"""Writing of new checkpoints and their other files: into a temporary folder, which is then moved as a whole."""
