"""PyTorch's FlexAttention as a kernel: functions of users, compiled by Inductor.

Read `kernel`, then `tiles` (the functions of one tile), `reads` and `bounds` (what they read, and where), `blocks`
(what is skipped) and `programs` (what is compiled, and kept).
"""
