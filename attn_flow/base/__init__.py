"""What every room stands on: checks of what users give, files, memory, progress, the style of figures."""
