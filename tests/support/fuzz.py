"""Random models under random compositions: what is drawn, as plain data.

A ``Draw`` prints as the Python expression that makes it again; ``fuzz_draw.py`` makes that of a seed.
``problem_of`` says why a draw makes no sense or is refused by the documentation: it is drawn again then, and
the shrinker (``fuzz_shrink.py``) leaves such steps out. ``fuzz_model.py`` builds the model, ``fuzz_run.py`` trains it
beside one process. Run ``python tests/support/fuzz.py --help`` for long runs and to reproduce a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

# Axes of every root mesh, before a draw puts them in its own order.
AXES = ("dp", "replicate", "gtp", "tp")

# Kinds that keep the width; the others have a width of their own.
KEEPING = ("layer_norm", "rms_norm", "group_norm", "attention", "conv2d", "late")
CHANGING = ("linear", "conv1d", "raw", "stack", "list", "mlp", "gru")
LOW_PRECISION = "bfloat16"

Problems = Iterator[tuple[bool, str]]


@dataclass(frozen=True)
class Layer:
    """One module of the model."""

    kind: str = "linear"  # what it is, see ``fuzz_model.make_layer``
    out: int = 0  # width of its output; 0 keeps that of its input
    bias: bool = True
    dtype: str = ""  # a dtype of its own; empty for that of the model
    residual: bool = False  # its output is added to its input
    tied: int = -1  # index of an earlier layer whose weight it shares, or -1
    frozen: str = ""  # ``all`` of its parameters, only the ``first``, or none
    unfrozen_at: int = 0  # from this step on everything trains (0: what is frozen stays so)
    period: int = 0  # left out in every ``period``-th backward of the run (0: never)
    nested: str = ""  # ``gtp_shard`` is called on it first: over the nested mesh (``mesh``) or over the same (``call``)
    # what ``shard_placement_fn`` says of its matrices: ``dim1``, ``block``, ``replicate``, or default
    placement: str = ""
    tp: bool = False  # whether ``parallelize_module`` cuts it
    compiled: bool = False  # whether it is compiled (``aot_eager``)


@dataclass(frozen=True)
class Span:
    """Positions ``start`` to ``stop`` of the program run in one ``checkpoint`` or under ``save_on_cpu``."""

    start: int
    stop: int
    kind: str


@dataclass(frozen=True)
class Draw:
    """A model, how it is sharded, and how it is trained."""

    seed: int = 0  # of initial values and batches
    layers: tuple[Layer, ...] = (Layer(out=5),)
    order: tuple[int, ...] = (0,)  # the program: indices into ``layers``
    spans: tuple[Span, ...] = ()  # activation checkpointing; disjoint or nested
    dtype: str = "float64"  # of parameters and input
    width: int = 4  # of the input, or of the embedding's rows
    vocabulary: int = 0  # input is tokens of an embedding with so many rows; 0: input is floats
    needs_input_grad: bool = False  # the input requires a gradient
    # composition
    # sizes of dp, replicate, gtp and tp; their product is the number of ranks (1, 2 or 4)
    axes: tuple[int, int, int, int] = (1, 1, 1, 1)
    hsdp: bool = False  # ``gtp_shard`` gets the 2-D mesh (replicate, gtp), also if replicate has one rank
    uses_dp: bool = False  # ``fully_shard`` over dp goes around, also if dp has one rank
    order_of_axes: tuple[int, int, int, int] = (0, 1, 2, 3)  # the root mesh has its axes in this order
    is_transposed: bool = False  # neighbours along replicate are neighbours in rank, not those along gtp
    flipped: tuple[str, ...] = ()  # axes along which ranks descend
    nested_axes: tuple[int, int] = (1, 1)  # sizes of replicate and gtp of the nested mesh, over the same ranks
    # policies
    prefetch_depth: int = 2
    max_inflight: int = 2
    prefetch_nbytes: int = 0
    coalesce_nbytes: int = 0
    expert_blocks_ahead: int = 1
    keep_nbytes: int = 0
    reduce_scatter: Literal["ring", "all_to_all"] = "ring"
    copies: bool = False  # copy engines gather and reduce, which takes GPUs
    min_shard_numel: int = 0
    embedding: Literal["gather", "exchange", "auto"] = "gather"
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    mixed: str = ""
    outer_reshard: bool = True
    outer_units: bool = False
    debug: str = ""
    # training
    rows: int = 1
    length: int = 3
    steps: int = 3
    microbatches: int = 1
    unsynced: str = ""
    retains_graph: bool = False
    interleaves: bool = False  # the forwards of all microbatches of a step run before their backwards
    breaks: str = ""  # an exception ends a ``forward`` or a ``backward`` before each step; training goes on
    scales: str = ""  # parameters are multiplied in place after each microbatch: each ``param``, or its ``local`` part
    evaluates: bool = False
    unshards: bool = False
    divides_by: int = 0
    keeps_zeros: bool = False
    optimizer: str = "local"
    clips: bool = False
    wgrad_first: bool = True
    keep_last: bool = True
    # ``forward`` runs the model, a ``method`` registered to count as one, or both take ``turns``
    calls: Literal["forward", "method", "turns"] = "forward"
    recipe: str = ""  # quantizes the weights of linear layers
    # the library chooses the schedule: layers of one class are blocks, whose weights are gathered together
    groups: bool = False
    shard_optimizer: bool = False  # the replicas split the states of optimizers
    offload: bool = False  # shards live on the host
    any_use: bool = False  # a rank may leave out weights (``set_reduce_scatter_unused_params``)
    hooks: bool = False  # each parameter has a hook that halves its gradient
    # what else happens, see ``fuzz_events``: between a forward and its backward, and after a step
    between: str = ""
    after: str = ""
    penalizes: bool = False  # the loss contains derivatives by the input, so its backward is a second one

    @property
    def world(self) -> int:
        return self.axes[0] * self.axes[1] * self.axes[2] * self.axes[3]

    @property
    def num_data(self) -> int:
        return self.axes[0] * self.axes[1] * self.axes[2]

    @property
    def is_low_precision(self) -> bool:
        return self.mixed == "low" or any(layer.dtype == LOW_PRECISION for layer in self.layers)


def show(value: Draw | Layer | Span) -> str:
    """The expression that makes ``value``, without what is left at its default."""

    def of(item: object) -> str:
        if isinstance(item, Draw | Layer | Span):
            return show(item)
        if isinstance(item, tuple) and item and isinstance(item[0], Layer | Span):
            return f"({', '.join(map(of, item))},)"
        return repr(item)

    given = [(f, getattr(value, f.name)) for f in fields(value)]
    return f"{type(value).__name__}({', '.join(f'{f.name}={of(v)}' for f, v in given if v != f.default)})"


def widths(draw: Draw) -> dict[int, tuple[int, int]] | None:
    """Width of input and output of each layer that the program runs; None if they do not fit together."""
    known: dict[int, tuple[int, int]] = {}
    width = draw.width
    for index in draw.order:
        layer = draw.layers[index]
        ends = (width, layer.out or width)
        if known.setdefault(index, ends) != ends:
            return None
        if (layer.residual or layer.period) and ends[0] != ends[1] and layer.kind != "embedding":
            return None
        width = ends[1]
    return known


def _shape_to_tie(layer: Layer, ends: tuple[int, int], vocabulary: int) -> tuple[int, ...]:
    if layer.kind == "embedding":
        return (vocabulary, ends[1])
    return ends[::-1] if layer.kind == "linear" else ends


def problem_of(draw: Draw) -> str:
    """Why ``draw`` cannot be run: it makes no sense, or the documentation refuses it. Empty if it can."""
    if not draw.order or not draw.layers or set(draw.order) != set(range(len(draw.layers))):
        return "the program leaves out a layer"
    ends = widths(draw)
    if ends is None:
        return "widths"
    problems = itertools.chain(
        *(_problems_of_layer(draw, index, ends) for index in range(len(draw.layers))),
        *(_problems_of_span(draw, span) for span in draw.spans),
        _problems_of_whole(draw),
        _problems_beside_fully_shard(draw) if draw.uses_dp else (),
    )
    return next((why for is_so, why in problems if is_so), "")


def _problems_of_layer(draw: Draw, index: int, ends: dict[int, tuple[int, int]]) -> Problems:
    layer = draw.layers[index]
    is_embedding = layer.kind == "embedding"
    yield is_embedding != (draw.vocabulary > 0 and index == 0), "an embedding comes first, where there are tokens"
    is_first_alone = draw.order.count(0) == 1 and draw.order[0] == 0 and not layer.residual and not layer.period
    yield is_embedding and not is_first_alone, "an embedding runs once, at the start"
    yield layer.kind in KEEPING and layer.out > 0, "the layer has no width of its own"
    yield layer.unfrozen_at > 0 and not layer.frozen, "nothing to unfreeze"
    yield layer.tp and (layer.kind != "mlp" or bool(layer.dtype or layer.nested)), "not tensor parallel"
    is_compilable = layer.kind in ("linear", "mlp", "raw") and not (layer.dtype or draw.uses_dp or layer.tp)
    yield layer.compiled and not is_compilable, "not compiled"
    has_other_axes = draw.uses_dp or draw.axes[3] > 1
    yield layer.nested == "mesh" and has_other_axes, "the nested mesh has the ranks of dp or tp, too"
    if layer.tied < 0:
        return
    other = draw.layers[layer.tied]
    kinds = (other.kind, layer.kind)
    can_tie = layer.tied < index and kinds in (("linear",) * 2, ("raw",) * 2, ("embedding", "linear"))
    yield not can_tie, "these kinds do not tie"
    # One gradient, so one dtype; a weight is frozen or not.
    shapes = [_shape_to_tie(draw.layers[i], ends[i], draw.vocabulary) for i in (layer.tied, index)]
    fits = shapes[0] == shapes[1] and layer.dtype == other.dtype and not layer.frozen and other.tied < 0
    yield not fits, "these weights do not tie"
    yield layer.placement != other.placement, "one weight has one placement"


def _problems_of_span(draw: Draw, span: Span) -> Problems:
    yield not 0 <= span.start < span.stop <= len(draw.order), "a span outside of the program"
    inside = draw.order[span.start : span.stop]
    outside = draw.order[: span.start] + draw.order[span.stop :]
    if span.kind == "selective":
        yield draw.retains_graph, "torch has no second backward through selective checkpointing"
        # with wrong gradients, also in one process
        yield any(draw.layers[i].kind == "gru" for i in inside), "torch saves products of a GRU that it overwrites"
        yield (draw.outer_units, "torch counts the ops of fully_shard's hooks there, which differ in the recomputation")
    if span.kind == "reentrant" and draw.outer_units:
        yield (
            bool(set(inside) & set(outside)),
            "fully_shard does not reduce the gradient of a unit used in and out of it",
        )
    for other in draw.spans:
        is_apart = other.stop <= span.start or span.stop <= other.start
        is_inside = other.start >= span.start and other.stop <= span.stop
        is_around = span.start >= other.start and span.stop <= other.stop
        yield not (is_apart or is_inside or is_around), "spans overlap"
        yield other is not span and is_inside and is_around, "two spans of one extent"


def _problems_of_whole(draw: Draw) -> Problems:
    dp, replicate, gtp, tp = draw.axes
    yield draw.world not in (1, 2, 4), "number of ranks"
    yield (replicate > 1 and not draw.hsdp) or (dp > 1 and not draw.uses_dp), "an axis that nobody uses"
    yield draw.nested_axes[0] * draw.nested_axes[1] != replicate * gtp, "the nested mesh has other ranks"
    layers = draw.layers
    has_own_dtype = any(layer.dtype for layer in layers)
    yield bool(draw.mixed) and has_own_dtype, "mixed precision casts everything to one dtype"
    yield draw.mixed == "low" and draw.dtype != "float32", "mixed precision casts down"
    is_double = draw.dtype == "float64" and not draw.mixed and not has_own_dtype
    is_adamw = draw.optimizer.startswith("adamw")
    yield is_adamw and not is_double, "AdamW blows up what rounding leaves of a gradient near zero"
    yield draw.unsynced == "all_reduce" and not draw.hsdp, "no replicas"
    yield draw.microbatches == 1 and bool(draw.unsynced), "nothing to accumulate"
    always_trains = any(not layer.frozen and not layer.period and layer.kind != "late" for layer in layers)
    yield bool(draw.unsynced) and not always_trains, "the last microbatch may have no backward, which would reduce"
    yield draw.interleaves and draw.microbatches == 1, "nothing to interleave"
    yield draw.interleaves and bool(draw.scales), "autograd refuses weights written between forward and backward"
    yield draw.shard_optimizer and (replicate == 1 or not draw.hsdp or draw.uses_dp), "no replicas"
    yield draw.copies and draw.offload, "copy engines send from the device"
    yield draw.offload and (draw.uses_dp or draw.shard_optimizer or bool(draw.recipe)), "refused on the host"
    is_always_used = not any(layer.period or layer.kind == "late" for layer in layers)
    yield draw.any_use and (draw.uses_dp or not is_always_used), "what no rank has used gets a gradient of zeros"
    yield draw.hooks and any(layer.frozen for layer in layers), "torch refuses hooks of frozen parameters"
    has_several = draw.microbatches > 1 or draw.retains_graph or any(span.kind == "reentrant" for span in draw.spans)
    yield draw.hooks and has_several, "a hook of one process runs in each backward, also in that of a reentrant span"
    trains_between = draw.between.startswith("train")
    yield trains_between and draw.hooks, "a hook of one process runs in each backward"
    yield trains_between and (bool(draw.unsynced) or draw.divides_by > 0), "its backward is reduced as that of the step"
    yield draw.between.endswith("apart") and bool(draw.mixed), "the model casts its inputs, not each layer"
    has_frozen_order = draw.hooks or bool(draw.unsynced) or bool(draw.breaks) or any(layer.frozen for layer in layers)
    yield draw.after == "toggle" and has_frozen_order, "these need parameters that are trained in each step"
    has_no_second = any(layer.kind == "attention" or layer.compiled or layer.tp for layer in layers)
    has_no_second |= any(span.kind in ("reentrant", "selective") for span in draw.spans) or bool(draw.recipe)
    yield draw.penalizes and (has_no_second or not draw.needs_input_grad), "torch has no second derivatives"
    yield bool(draw.after and draw.recipe), "the reference takes over what a recipe makes of the weights"
    middle = layers[draw.order[len(draw.order) // 2]]
    breaks_never = bool(middle.period or middle.frozen or middle.kind == "late")
    yield bool(draw.breaks) and breaks_never, "nothing would break"
    if draw.recipe:
        is_plain = draw.dtype == "float32" and not draw.mixed and not has_own_dtype
        yield not is_plain, "the reference of recipes computes in float32"
        is_cut = any(layer.tp or layer.placement in ("block", "replicate") for layer in layers)
        yield is_cut, "shards that may cut blocks of the recipe, or none"
        yield all(layer.kind not in ("linear", "mlp") for layer in layers), "nothing to quantize"
    has_tp = tp > 1 or any(layer.tp for layer in layers)
    yield (bool(draw.flipped) and (has_tp or draw.uses_dp), "a mesh whose ranks descend shares no root with dp and tp")


def _problems_beside_fully_shard(draw: Draw) -> Problems:
    yield any(layer.dtype for layer in draw.layers), "fully_shard expects one dtype"
    has_blocks = draw.recipe not in ("", "float8_rowwise", "float8_tensorwise")
    has_blocks |= any(layer.placement == "block" for layer in draw.layers)
    yield has_blocks, "fully_shard over blocks is refused, where they are not torch's chunks"
    yield bool(draw.breaks) or draw.interleaves, "fully_shard alone does not promise that"
    has_switches = draw.retains_graph or draw.unshards or bool(draw.unsynced) or not draw.reshard_after_backward
    yield has_switches, "fully_shard has switches of its own"
    yield draw.divides_by > 0, "fully_shard divides, too"
    yield (
        bool(draw.between or draw.after or draw.penalizes),
        "fully_shard has rules of its own for other forwards and writes",
    )
    yield draw.hsdp and any(layer.tp for layer in draw.layers), "fully_shard takes parameters of two axes at most"
    unfreezes = any(layer.unfrozen_at for layer in draw.layers)
    yield not draw.outer_reshard and unfreezes, "parameters that stay registered hide the sharded from requires_grad_"


if __name__ == "__main__":
    # What the workers unpickle are classes of the module ``fuzz``, not of ``__main__``.
    from fuzz_cli import main

    raise SystemExit(main())
