"""What a call will do, without doing it: figures, text and picture.

`explain` is the function, `variants` has the figures, `telling` the text, and `picture` the drawing.
"""
