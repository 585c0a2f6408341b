"""How long a call takes and what memory it needs, from its schedule and a few measured numbers.

`time` and `memory` are the formulas, `machines` the numbers of a group's GPUs.
"""
