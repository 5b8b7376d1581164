"""Plug-ins by their dotted path."""

import importlib


def load_function(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
