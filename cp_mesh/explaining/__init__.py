"""What a call will do, without doing it: figures of layouts and methods, text, picture, and what is refused."""
