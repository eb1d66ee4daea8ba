"""What DTensor must learn for our placements: layouts, propagation of ops, norms, random values."""

from ..placement import Lessons, teach
from .propagation import install, prepare

teach(Lessons(for_any=prepare, for_blocks=install))
