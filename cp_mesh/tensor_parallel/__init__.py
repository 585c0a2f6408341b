"""Linears, embeddings and losses over a tp axis, beside which rows of the sequence travel.

Read `styles` (what plans name) and `plan` (a plan for a Llama), then `matmul`, what `colwise` and `rowwise` share, and
`vocab_parallel`, the vocabulary over tp.
"""
