"""Pages that open in a browser, offline: the playground, and a simulation one can move through."""
