"""Communication: streams, process groups, collectives, and the backends that carry them."""
