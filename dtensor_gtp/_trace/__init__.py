"""Traces of ``torch.profiler``: reading, numbers, pictures. All are functions of the trace, without torch."""
