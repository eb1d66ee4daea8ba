"""``gtp_shard`` in libraries that train models. Each module needs its library: install the extra of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Names the extra if an import within fails.

    Raises:
        ImportError: Something that is imported within is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"dtensor_gtp.integrations.{name} expects an installed {name}, but got: {error}. Do pip install "
            f"'dtensor-gtp[{name}]'."
        ) from error
