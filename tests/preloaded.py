"""Imported last by the server from which ranks are forked, which thus has what each would import and look up itself."""

import inspect

import ranks  # noqa: F401
from _pytest.assertion import install_importhook
from _pytest.config import get_config

import cp_mesh

for name in cp_mesh.__all__:
    getattr(cp_mesh, name)  # loads it

# Ops are registered with the file of their module, for which all modules' files are looked up once.
inspect.getmodule(inspect.currentframe())

install_importhook(get_config())  # ranks that import a test file tell the values of a failed assert
