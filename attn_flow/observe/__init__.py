"""Numbers of a cloud of tokens, and events of its clusters along a trajectory."""
