"""Draws the models and compositions of the fuzzer."""

from __future__ import annotations

import random
from dataclasses import replace

from fuzz import CHANGING, KEEPING, LOW_PRECISION, Draw, Layer, Span, problem_of
from fuzz_events import AFTER, BETWEEN


def draw_of(seed: int) -> Draw:
    """The draw of a seed."""
    rng = random.Random(seed)
    while True:
        draw = _draw(rng, seed)
        if not problem_of(draw):
            for change in (_grouped, _quantized, _with_options, _with_events):
                changed = change(random.Random(-1 - seed), draw)
                draw = draw if problem_of(changed) else changed
            return draw


def _grouped(rng: random.Random, draw: Draw) -> Draw:
    """``draw`` with groups, half of the time: with more layers of several weights, of few classes, on more ranks."""
    if rng.random() < 0.5:
        return draw
    replicate = draw.axes[1]
    changes = [
        {"groups": True},
        {"axes": (1, replicate, 2, 1), "nested_axes": (replicate, 2), "uses_dp": False, "outer_units": False},
        {"min_shard_numel": 0},
        {"dtype": "float32", "mixed": "", "optimizer": "momentum"} if rng.random() < 0.4 else {},  # as recipes need
    ]
    for some in changes:
        changed = replace(draw, **some)
        draw = draw if problem_of(changed) or rng.random() < 0.1 else changed
    kinds = rng.choices(("mlp", "mlp", "list", "late", "attention"), k=2)
    for index, layer in enumerate(draw.layers):
        nested = rng.choice(("", layer.nested, "call"))  # calls on blocks are groups, too
        block = replace(layer, kind=rng.choice(kinds), nested=nested, tied=-1, placement="", dtype="", tp=False)
        changed = replace(draw, layers=(*draw.layers[:index], block, *draw.layers[index + 1 :]))
        draw = draw if problem_of(changed) or rng.random() < 0.1 else changed
    return draw


def _quantized(rng: random.Random, draw: Draw) -> Draw:
    """``draw`` with a recipe, two times of three, and perhaps with layers of several blocks."""
    some = rng.choice(("mxfp8", "nvfp4", "float8_rowwise", "float8_blockwise", "float8_tensorwise"))
    recipe = rng.choice(("", some, some))
    factor = rng.choice((1, 7, 9)) if recipe else 1
    is_head = [layer.tied == 0 and draw.vocabulary > 0 for layer in draw.layers]
    layers = [
        layer if head else replace(layer, out=factor * layer.out)
        for layer, head in zip(draw.layers, is_head, strict=True)
    ]
    return replace(draw, recipe=recipe, width=factor * draw.width, layers=tuple(layers))


def _with_options(rng: random.Random, draw: Draw) -> Draw:
    for option in ("shard_optimizer", "offload", "any_use", "hooks"):
        changed = replace(draw, **{option: True})
        draw = changed if rng.random() < 0.15 and not problem_of(changed) else draw
    return draw


def _with_events(rng: random.Random, draw: Draw) -> Draw:
    for field, events in (("between", BETWEEN), ("after", AFTER)):
        changed = replace(draw, **{field: rng.choice(events)})
        draw = changed if rng.random() < 0.4 and not problem_of(changed) else draw
    changed = replace(draw, penalizes=True)
    return changed if rng.random() < 0.5 and not problem_of(changed) else draw


def _draw(rng: random.Random, seed: int) -> Draw:
    axes = _draw_axes(rng)
    uses_dp = axes[0] > 1 or rng.random() < 0.05
    low = rng.random() < 0.1
    dtype = "float32" if low else rng.choice(("float32", "float64", "float64"))
    vocabulary = rng.choice((0, 0, 7, 11, 16))
    layers, order = _draw_program(rng, vocabulary, axes, low, uses_dp)
    microbatches = rng.choice((1, 1, 2, 3))
    stock = ("sgd", "momentum") if low else ("sgd", "momentum", "adamw", "adamw_fused", "adamw_single")
    num_gtp = axes[1] * axes[2]
    nested_gtp = rng.choice([size for size in (1, 2, 4) if num_gtp % size == 0])
    return Draw(
        seed=seed,
        layers=layers,
        order=order,
        spans=_draw_spans(rng, len(order)),
        dtype=dtype,
        width=rng.choice((4, 6, 6, 5, 8)),
        vocabulary=vocabulary,
        needs_input_grad=not vocabulary and rng.random() < 0.3,
        axes=axes,
        hsdp=axes[1] > 1 or rng.random() < 0.2,
        uses_dp=uses_dp,
        order_of_axes=rng.choice(((0, 1, 2, 3), (0, 1, 2, 3), (0, 3, 1, 2))),
        is_transposed=rng.random() < 0.2,
        flipped=tuple(axis for axis in ("replicate", "gtp") if rng.random() < 0.15),
        nested_axes=(num_gtp // nested_gtp, nested_gtp),
        prefetch_depth=rng.choice((0, 1, 2, 2, 3, 4)),
        max_inflight=rng.choice((1, 2, 2, 4)),
        min_shard_numel=rng.choice((0, 0, 0, 0, 20, 1024)),
        reshard_after_forward=rng.random() < 0.75,
        reshard_after_backward=uses_dp or rng.random() < 0.8,
        mixed="low" if low and rng.random() < 0.5 else rng.choice(("", "", "", "wide", "narrow", "reduce")),
        outer_reshard=rng.random() < 0.7,
        outer_units=uses_dp and rng.random() < 0.5,
        debug=rng.choice(("", "", "", "", "poison", "poison", "delay", "poison,delay", "poison,order,finite")),
        rows=rng.choice((1, 2)),
        length=rng.choice((2, 3, 4)),
        microbatches=microbatches,
        unsynced=rng.choice(("", "gradient", "all_reduce")) if microbatches > 1 and not uses_dp else "",
        retains_graph=not uses_dp and rng.random() < 0.1,
        interleaves=microbatches > 1 and not uses_dp and rng.random() < 0.3,
        breaks=rng.choice(("forward", "backward")) if not uses_dp and rng.random() < 0.1 else "",
        scales=rng.choice(("param", "local")) if rng.random() < 0.15 else "",
        evaluates=rng.random() < 0.2,
        unshards=not uses_dp and rng.random() < 0.1,
        divides_by=rng.choice((1, 3)) if not uses_dp and rng.random() < 0.1 else 0,
        keeps_zeros=rng.random() < 0.2,
        optimizer=rng.choice(stock) if rng.random() < 0.4 else "local",
        clips=rng.random() < 0.15,
        prefetch_nbytes=rng.choice((0, 600, 256 << 20)),
        coalesce_nbytes=rng.choice((0, 600, 2000, 64 << 20)),
        expert_blocks_ahead=rng.choice((0, 1, 1, 2)),
        keep_nbytes=rng.choice((0, 0, 600, 1 << 20)),
        embedding=rng.choice(("gather", "exchange", "auto")) if vocabulary else "gather",
        reduce_scatter=rng.choice(("ring", "ring", "all_to_all")),
        wgrad_first=rng.random() < 0.8,
        keep_last=rng.random() < 0.8,
        calls=rng.choice(("forward", "forward", "forward", "method", "turns")),
    )


def _draw_axes(rng: random.Random) -> tuple[int, int, int, int]:
    """Two ranks most of the time, because they find most and cost little."""
    sizes = [1, 1, 1, 1]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
        sizes[rng.choice((0, 1, 2, 2, 2, 3))] *= 2
    return (sizes[0], sizes[1], sizes[2], sizes[3])


def _draw_program(
    rng: random.Random, vocabulary: int, axes: tuple[int, ...], low: bool, uses_dp: bool
) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    layers = [Layer("embedding")] if vocabulary else []
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        layers.append(_draw_layer(rng, len(layers), axes, low, uses_dp))
    order = list(range(len(layers)))
    if vocabulary and rng.random() < 0.5:
        layers.append(Layer("linear", out=vocabulary, bias=rng.random() < 0.3, tied=0))
        order.append(len(layers) - 1)
    for _ in range(rng.choice((0, 0, 1, 2))):  # a layer once more, somewhere after its first time
        position = rng.randrange(len(order))
        order.insert(rng.randint(position, len(order)), order[position])
    return tuple(layers), tuple(order)


def _draw_layer(rng: random.Random, index: int, axes: tuple[int, ...], low: bool, uses_dp: bool) -> Layer:
    kind = rng.choice(("linear",) * 4 + ("raw", "raw", "mlp", "mlp") + CHANGING + KEEPING)
    is_tp = kind == "mlp" and rng.random() < (0.8 if axes[3] > 1 else 0.1)
    own_dtypes = (LOW_PRECISION,) if low else ("", "", "", "", "", "float32", "float64")
    frozen = rng.choice(("", "", "", "", "", "all", "first"))
    return Layer(
        kind=kind,
        out=0 if kind in KEEPING or rng.random() < 0.6 else rng.choice((1, 3, 4, 6, 7, 10)),
        bias=rng.random() < 0.7,
        dtype=rng.choice(("", "", "", *own_dtypes)),
        residual=rng.random() < 0.25,
        tied=rng.randrange(index) if index and rng.random() < 0.2 else -1,
        frozen=frozen,
        unfrozen_at=1 if frozen and rng.random() < 0.4 else 0,
        period=rng.choice((2, 3)) if rng.random() < 0.15 else 0,
        nested=rng.choice(("mesh", "call")) if rng.random() < 0.15 and not uses_dp else "",
        placement=rng.choice(("dim1", "replicate") if uses_dp else ("dim1", "block", "replicate"))
        if rng.random() < 0.2
        else "",
        tp=is_tp,
        compiled=rng.random() < 0.003,
    )


def _draw_spans(rng: random.Random, length: int) -> tuple[Span, ...]:
    spans = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        start = rng.randrange(length)
        stop = rng.randint(start + 1, length)
        spans.append(Span(start, stop, rng.choice(("reentrant", "nonreentrant", "nonreentrant", "selective", "cpu"))))
    return tuple(spans)
