"""Fused ops: forward and backward of a layer around the gather of its weight and the scatter of its
gradient."""
