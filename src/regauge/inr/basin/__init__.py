"""One basin: networks that are moved until the line from another one is flat."""
