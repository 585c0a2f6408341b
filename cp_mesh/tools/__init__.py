"""Tools to run before training: verification, explanation, prediction and warm-up.

`verification` tests a configuration or a model, `explain` describes what a call will run, `warming` compiles early.
"""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
