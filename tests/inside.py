"""What the pins of test_pins.py read of the inside of cp_mesh: when a name moves, a line here is what changes."""

from __future__ import annotations

from pathlib import Path

import cp_mesh

SOURCES = str(Path(cp_mesh.__file__).parent)
"""The folder of our own functions."""
