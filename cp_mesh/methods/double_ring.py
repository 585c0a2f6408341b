"""The double ring, Gu et al. 2024 (LoongTrain, arXiv:2406.18485): a ring within each host, and one between hosts.

A rank visits the ranks of its own host, then those of the host before, and so on. Rows of another host cross to its own
once, between ranks in one place, however many ranks of the host need them, and are read there over the host's links;
gradients are summed where the rows crossed to, and go home once. So the network moves the bytes of one rank for each
host, not for each rank, while the links of the host move the rest. Tiles, masks and sums are those of the ring.
"""

from functools import partial
