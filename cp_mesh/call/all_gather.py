"""All-gather: the keys that a rank needs are fetched all at once, behind its local tiles; Llama 3 (arXiv:2407.21783).

The fewest kernel calls and the fewest collectives: one fetch a pass, and one delivery of gradients, which their owners
sum in fp32. As in the ring only rows that some query of the receiver may see travel. What is fetched is held at once,
and where the local tiles take less time than the fetch, the rest of it is waited for; in the backward they hide the
delivery instead, which is no smaller, and the fetch is waited for.
"""

from cp_mesh.call.ring_loop import method_of
from cp_mesh.geometry.schedule import in_one_stage

ALL_GATHER = method_of("all_gather", in_one_stage)
