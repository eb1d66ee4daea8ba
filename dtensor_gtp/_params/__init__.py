"""Managed parameters: their layout, how they are gathered, and where their gradients wait."""
