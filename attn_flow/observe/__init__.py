"""Numbers of a cloud, events of a path."""
