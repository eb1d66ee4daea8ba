"""One managed parameter: its layout, what crosses the wire, its gathered states, what autograd saves of it."""
