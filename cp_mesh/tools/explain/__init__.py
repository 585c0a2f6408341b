"""Describe what a call will run, without running it: figures, text and picture.

`explain` has the public function, `variants` computes the figures, `text` formats them, and `picture` draws them.
"""
