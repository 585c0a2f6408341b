"""Bugs that this field is known for, planted in ranks while they run; test_mutations.py shows that each is found.

There are 393 in 28 areas; the areas are those of `in_area` in each file.

To add one, write ``@plant(name, seam, *checks)`` over a function that is given what is at the seam and returns what
takes its place; see seams.py. No bug quotes source: those of Triton kernels are planted in the Python that launches
them, or in device functions, which Triton's interpreter finds by name.
"""

from importlib import import_module

from planted.seams import MUTATIONS, Mutation, SeamLost

for name in [
    "decoding",
    "functions",
    "geometry",
    "guard",
    "in_triton",
    "kernels",
    "linears",
    "loop",
    "mixers",
    "training",
]:
    import_module(f"planted.{name}")

__all__ = ["MUTATIONS", "Mutation", "SeamLost"]
