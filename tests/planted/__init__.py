"""Bugs that this field is known for, planted in copies of the package; test_mutations.py shows that each is found."""

from planted import geometry, in_triton, kernels, loop, training
from planted.seams import MUTATIONS, Mutation, SeamLost, infect

__all__ = ["MUTATIONS", "Mutation", "SeamLost", "geometry", "in_triton", "infect", "kernels", "loop", "training"]
