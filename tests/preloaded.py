"""Imported last by the server from which ranks are forked, which thus has what each would import and look up itself."""

import inspect

import ranks  # noqa: F401

# Ops are registered with the file of their module, for which all modules' files are looked up once.
inspect.getmodule(inspect.currentframe())
