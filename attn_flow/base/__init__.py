"""What all packages use: checks of arguments, files, texts, progress, processes and the style of figures."""
