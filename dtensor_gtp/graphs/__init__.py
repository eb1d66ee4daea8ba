"""CUDA graphs of whole training steps and of single blocks."""
