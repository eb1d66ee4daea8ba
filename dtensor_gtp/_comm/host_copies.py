"""Copies of shards that live on the host, to the device ahead of their gathers, on their own stream.

The way back needs no stream of its own: a reduced gradient is copied on the stream on which it was completed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .streams import Streams


class HostCopies:
    """The upload stream of one device."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._upload_stream: torch.Stream | None = None  # made by the first upload
        self._last_upload: torch.Event | None = None

    @torch.no_grad()
    def upload(self, shards: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        """Copies of ``shards`` on the device, and when they may be read (None: now). Their memory is that of the
        compute stream, see [Note: streams and memory]: hold them until it has waited for whoever reads them."""
        copies = [torch.empty(shard.shape, dtype=shard.dtype, device=self._streams.device) for shard in shards]
        if self._streams.has_streams and self._upload_stream is None:
            self._upload_stream = self._streams.new_stream()
        with self._streams.fork(self._upload_stream):
            self._streams.delay()
            for copy, shard in zip(copies, shards, strict=True):
                copy.copy_(shard.detach(), non_blocking=True)
            if self._upload_stream is not None:
                self._last_upload = self._upload_stream.record_event()
        return copies, self._last_upload

    def note_uploads(self) -> None:
        """The compute stream was given copies of parameters on the host."""
        if self._streams.has_streams:
            self._last_upload = self._streams.compute_stream().record_event()

    def finish_uploads(self) -> None:
        """Let the host wait until nothing reads its shards any more: it may write to them now, without a trace here."""
        if self._last_upload is not None:
            self._last_upload.synchronize()
            self._last_upload = None

    def finish_on_host(self) -> None:
        """Let the host wait for the compute stream, e.g. to read gradients that were copied there."""
        if self._streams.has_streams:
            self._streams.compute_stream().synchronize()
