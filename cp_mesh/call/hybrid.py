"""The hybrid, Fang and Zhao 2024 (arXiv:2405.07719): Ulysses among neighbours, a ring between the groups of these.

Rank r of the cp axis is the one of number r mod U in inner group r // U. It exchanges heads for rows in its group, and
visits the keys of the other groups, for its heads, by the stages of the ring. Heads limit U, not the number of ranks;
the ring has fewer ranks, whose shards are longer; and the inner groups may be hosts, so that what travels between hosts
is the ring's alone.
"""

from __future__ import annotations

import math

from cp_mesh.call.method import Method
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.call.ulysses import backward, forward, kept_shapes, schedule_of_groups, settle
from cp_mesh.errors import refuse


def choose_degree(options: AttentionSpec, q: Operand, k: Operand, cp_size: int) -> int:
    """The degree asked for; or the largest that divides the ranks and the kv heads, or if only 1 does, the query heads.

    See `Method.choose_degree`.
    """
    num_heads, num_kv_heads, degree = q.shape[1], k.shape[1], options.ulysses_degree
    if not degree:
        common = math.gcd(num_kv_heads, cp_size)
        return common if common > 1 else math.gcd(num_heads, cp_size)
    if cp_size % degree or num_heads % degree:
        both = math.gcd(cp_size, num_heads)
        near = max(n for n in range(1, min(both, degree) + 1) if both % n == 0)
        expected = f"a divisor of the {cp_size} cp ranks and of the {num_heads} query heads"
        refuse("method='hybrid': ulysses_degree", expected, degree, f"ulysses_degree={near} works, or method='ring'")
    return degree


HYBRID = Method(
    "hybrid", choose_degree, schedule_of_groups, settle, forward, backward,
    kept_shapes=kept_shapes, swaps=True, degree_option="ulysses_degree",
)  # fmt: skip
