"""Adapters to other packages: one file for each, which imports that package, and is imported only when asked for."""
