"""What a call will do, without doing it: figures, text, picture, and what is refused.

`explain` is the function, `variants` has the figures, `telling` the text, `picture` the drawing, and `capabilities`
what is computed and what is refused.
"""
