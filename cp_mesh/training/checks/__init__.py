"""Checks of a training set-up; `docs/guard.md` lists what they find.

Attention outside of the plan (`coverage`), attention settings that styles lack (`config`), inputs of models without a
`ShardedModel` (`inputs`), labels of the first loss (`labels`), and gradients that ranks did not sum (`gradients`).
"""
