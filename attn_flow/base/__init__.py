"""What all packages use: checks of arguments, files, progress, processes and the style of figures."""
