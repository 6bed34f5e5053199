"""Networks that are signals: implicit representations of images and 3D shapes."""
