"""Pages of the site that are made when it is built: public names, commands, formats, the gallery."""
