"""Ring attention, Liu et al. 2023 (arXiv:2310.01889): each rank visits the keys of all ranks, a few sources a stage.

A stage hides the fetch of the next one, and its own is small: buffers of keys are those of two stages, the wait for the
first is short, and most of the time something travels.
"""

from cp_mesh.call.ring_loop import method_of
from cp_mesh.geometry.schedule import in_rising_stages

RING = method_of("ring", in_rising_stages)
