"""Generation: few queries against keys that ranks share.

Read `decode` (the function), `cache` (the keys and values of a layer) and `split_kv` with its Triton kernels, which
spread the keys of one head over a GPU.
"""
