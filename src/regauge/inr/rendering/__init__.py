"""Rendering of signals: images, meshes, point clouds, and networks on a path."""
