"""From an initial cloud to a later one: `flow`, its steps and noise, densities, and linearisation."""
