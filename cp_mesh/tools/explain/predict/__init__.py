"""How long a call takes and what memory it needs, from its schedule and a few measured numbers.

`time` and `memory` are the formulas, `methods` says which of them hold for a method, `machines` reads and writes
numbers. They inform: nothing that a call does depends on them.
"""
