"""Widget models: all state and numbers of the interactive views, without ipywidgets and matplotlib."""
