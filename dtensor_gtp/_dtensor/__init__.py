"""What DTensor must learn for our placements: layouts, propagation of ops, norms, random values."""

from ..placement import GTPShard, Preparation
from .propagation import install, prepare

GTPShard._preparation = Preparation(for_any=prepare, for_blocks=install)
