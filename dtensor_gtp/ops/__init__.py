"""Fused ops: forward and backward of a layer around the gather of its weight and the scatter of its gradient.

They save only the input. Nothing full-sized outlives the GEMM that uses it.
"""
