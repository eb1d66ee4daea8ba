"""When weights are gathered, kept and freed, and when gradients are reduced."""
