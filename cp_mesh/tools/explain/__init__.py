"""What a call will do, without doing it: figures, text and picture.

`explain` is the function, `variants` has the figures, `text` words them, and `picture` the drawing.
"""
