"""What is asked before or beside training: proofs, explanations, predictions and warm-up.

`verify` proves a configuration or a model, `explain` says what a call will do, and `warm_up` compiles beforehand.
"""
