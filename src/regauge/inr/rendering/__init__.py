"""Signals made visible: images, meshes, point clouds, and what lies on a path between two networks."""
