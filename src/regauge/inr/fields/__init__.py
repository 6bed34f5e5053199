"""Fields of shapes: where they are asked, exact distances, and the labels that networks learn."""
