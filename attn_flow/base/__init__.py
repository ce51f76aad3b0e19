"""What every room stands on: checks of what users give, files, memory, progress, terminal, the style of figures."""
