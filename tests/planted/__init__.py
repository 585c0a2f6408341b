"""Bugs that this field is known for, planted in copies of the package; test_mutations.py shows that each is found.

How many there are, by what they break:

the choice of a method      13
decoding                    11
functions of users          41
masks                       12
masks as integers           12
layouts                      7
the schedule                15
documents as sequences       7
balanced layouts             4
the guard                   23
kernels in Triton           34
kernels                     25
merging                      5
scores                      30
linears over tp             22
the loop                     7
gradients                   11
other methods               16
the hybrid                   7
the double ring              7
the transport               12
plans that are kept          3
the op and DTensors          8
data and loss               20
styles                       7
watching                     4
check mode and verify       10
in all                     373

To add one, write ``@plant(name, seam, *checks)`` over a function that is given what is at the seam and returns what
takes its place; see seams.py. No bug quotes source: those of Triton kernels are planted in the Python that launches
them, or in device functions, which Triton's interpreter finds by name.
"""

from planted import choosing, decoding, functions, geometry, guard, in_triton, kernels, linears, loop, training
from planted.seams import MUTATIONS, Mutation, SeamLost, infect

__all__ = [
    "MUTATIONS",
    "Mutation",
    "SeamLost",
    "choosing",
    "decoding",
    "functions",
    "geometry",
    "guard",
    "in_triton",
    "infect",
    "kernels",
    "linears",
    "loop",
    "training",
]
