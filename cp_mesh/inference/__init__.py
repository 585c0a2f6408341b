"""Generation: few queries against keys that ranks share.

Read `decode` (the function), `cache` (the keys and values of a layer) and `split_kv` with its kernels in
`split_kv_triton`, which spread the keys of one head over a GPU.
"""
