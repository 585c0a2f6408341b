"""What is looked at in a training set-up besides attention itself; `docs/guard.md` lists what is found.

Attention outside of the plan (`coverage`), what modules state and styles do not (`config`), inputs without a root
(`inputs`), and gradients that ranks did not sum (`gradients`).
"""
