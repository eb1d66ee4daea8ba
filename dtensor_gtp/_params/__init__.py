"""Managed parameters: their layout, how they are gathered, and what autograd saves of them."""
