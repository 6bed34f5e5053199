"""Writing of new checkpoints with other files and provenance: into a staging folder, then moved as a whole."""
