"""Draw training runs side by side: `python -m miles.tools.plot_run DIR [DIR ...]`."""
