"""Bugs that this field is known for, planted on ranks; test_mutations.py shows that tests find each.

To add one, write ``@plant(name, seam, *checks)`` over a function that is given what is at the seam and returns what
takes its place; see seams.py. No bug quotes source.
"""

from importlib import import_module

from planted.seams import MUTATIONS, Mutation, SeamLost, infected_pools

for name in ("geometry", "loop", "rooms", "training"):
    import_module(f"planted.{name}")

__all__ = ["MUTATIONS", "Mutation", "SeamLost", "infected_pools"]
