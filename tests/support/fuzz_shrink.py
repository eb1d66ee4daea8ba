"""The search for a smaller draw that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz import Draw, Layer, Span, problem_of
from fuzz_run import Outcome


def kind_of(outcome: Outcome) -> str:
    """What must stay the same while a draw shrinks: the exception, or that results differ."""
    if not outcome.failures:
        return ""
    if not outcome.is_raised:
        return "difference"
    # The exception's own line: the first that is not indented, after the traceback's heading. Ranks that only waited
    # for the one that raised come last.
    texts = [text for text in outcome.failures.values() if text.startswith("Traceback")]
    lines = [line for text in texts for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    own = [line for line in lines if "Timed out" not in line and "Connection closed" not in line] or lines
    return own[0][:60] if own else "died"


def shrink(draw: Draw, fails: Callable[[Draw], bool]) -> Draw:
    """A draw that ``fails`` as ``draw`` does, and none of the steps that ``simpler`` knows makes it smaller."""
    while True:
        smaller = next((one for one in simpler(draw) if not problem_of(one) and fails(one)), None)
        if smaller is None:
            return draw
        draw = smaller


def simpler(draw: Draw) -> Iterator[Draw]:
    """Draws that are one step simpler: those that save most come first."""
    yield from (_without_position(draw, position) for position in range(len(draw.order)))
    yield from _fewer_ranks(draw)
    yield from (replace(draw, spans=draw.spans[:i] + draw.spans[i + 1 :]) for i in range(len(draw.spans)))
    for name, value in (("steps", 1), ("steps", draw.steps - 1), ("microbatches", draw.microbatches - 1)):
        if 1 <= value < getattr(draw, name):
            changes: dict[str, Any] = {name: value}
            yield replace(draw, **changes, **({"unsynced": ""} if changes.get("microbatches") == 1 else {}))
    kept = ("seed", "layers", "order", "spans", "axes", "steps", "microbatches", "vocabulary", "width", "nested_axes")
    yield from _defaults(draw, kept)
    for i, layer in enumerate(draw.layers):
        for simple in _defaults(layer, ("kind", "out")):
            yield _with_layer(draw, i, simple)
        if layer.frozen:
            yield _with_layer(draw, i, replace(layer, frozen="", unfrozen_at=0))
        if layer.kind not in ("linear", "embedding"):
            yield _with_layer(draw, i, replace(layer, kind="linear", tp=False))
        if layer.out:
            yield _with_layer(draw, i, replace(layer, out=0))
    for i, span in enumerate(draw.spans):
        if span.kind != "nonreentrant":
            yield replace(draw, spans=(*draw.spans[:i], replace(span, kind="nonreentrant"), *draw.spans[i + 1 :]))


def _defaults(value: Any, kept: tuple[str, ...]) -> Iterator[Any]:
    """``value`` with one field at its default."""
    for field in fields(value):
        if field.name not in kept and getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})


def _with_layer(draw: Draw, index: int, layer: Layer) -> Draw:
    return replace(draw, layers=(*draw.layers[:index], layer, *draw.layers[index + 1 :]))


def _without_position(draw: Draw, position: int) -> Draw:
    """The program without one position, and without a layer that nothing runs any more."""
    order = draw.order[:position] + draw.order[position + 1 :]
    spans = [
        Span(s.start - (s.start > position), s.stop - (s.stop > position), s.kind)
        for s in draw.spans
        if not (s.start == position and s.stop == position + 1)
    ]
    layers = list(draw.layers)
    gone = draw.order[position]
    vocabulary = draw.vocabulary
    if gone not in order:
        vocabulary = 0 if layers[gone].kind == "embedding" else vocabulary
        ties = [-1 if layer.tied == gone else layer.tied - (layer.tied > gone) for layer in layers]
        layers = [replace(layer, tied=tied) for layer, tied in zip(layers, ties, strict=True)]
        del layers[gone]
        order = tuple(index - (index > gone) for index in order)
    return replace(draw, layers=tuple(layers), order=order, spans=tuple(spans), vocabulary=vocabulary)


def _fewer_ranks(draw: Draw) -> Iterator[Draw]:
    for axis, size in enumerate(draw.axes):
        if size > 1:
            axes = list(draw.axes)
            axes[axis] = size // 2
            num_gtp = axes[1] * axes[2]
            nested = (1, num_gtp) if num_gtp != draw.nested_axes[0] * draw.nested_axes[1] else draw.nested_axes
            yield replace(draw, axes=tuple(axes), nested_axes=nested)
