"""Fields of shapes: query points, exact distances, and the labels that networks learn."""
