"""Times a training step under ``gtp_shard`` beside its peers, in one job and on one model.

    torchrun --nproc-per-node 8 examples/benchmarks/train_step.py --json results.json
    torchrun --nproc-per-node 2 examples/benchmarks/train_step.py --preset tiny     # also on a CPU, in seconds

The modes are described at ``modes.build_mode``; ``--compile`` adds each of them with compiled blocks. They take turns,
each with the same initial weights and the same tokens; the model of one is freed before the next is built. ``--rounds``
repeats the turns, so that a slow drift of the machine reaches all of them. The loss and the gradient norm of the first
step are recorded with the times: modes that compute the same thing agree on them.

Times are medians over the timed steps, of each the slowest process's, by CUDA events; the host waits for the device
after each step, unless ``--free-running``. ``x FSDP2`` and its like are ratios of times: below 1 is faster. Memory is
described at ``harness.Memory``; "above activations" is the peak less the state and what activations alone need.
"predicted ms" is what ``gtp-plan`` says. An error in one mode is printed and the others go on; the exit status is then
1.

``--host-time`` measures something else, the host's time per use of a weight: see ``host_time.py``.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from dtensor_gtp.planner.model import ModelConfig
from explain_memory import explain_peak, most_activations, symmetric_bytes
from harness import (
    MemoryMeter,
    World,
    add_schedule_option,
    allocate_workspaces,
    gradient_norm,
    init_world,
    release_memory,
    time_steps,
    trace_steps,
)
from host_time import FAKE_WORLD_SIZE, measure_host_time, print_host_time
from launch import run
from llama import LlamaConfig
from modes import (
    BASES,
    BLOCK_GRAPHS,
    COMPILED,
    GRAPH,
    MEGATRON,
    MODES,
    OPTIONS,
    PRESETS,
    Mode,
    Workload,
    build_mode,
    build_optimizer,
    make_recipe,
    make_step,
    recipe_modes,
)
from peers import has_megatron
from predict_step import find_machine, setting_of, step_ms
from report import Measurement, describe, environment, markdown_table, memory_lines, rows, step_table, write_json

FORWARD_BACKWARD, FULL_STEP = "forward+backward", "full step"

# eager calls before capture_step records, and the recording
_CAPTURE_CALLS = 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--modes",
        nargs="+",
        default=[*MODES, *(MEGATRON if has_megatron() else ())],
        metavar="MODE",
        help=f"any of {', '.join((*MODES, *MEGATRON, *OPTIONS))}, or a family such as gtp; default: all but the last "
        "two, those of megatron where megatron-fsdp is installed. A name as the table has it, such as "
        "gtp-bf16@float8_tensorwise-compiled-graph, is that mode alone, whatever --compile, --graph, --recipe add",
    )
    add("--preset", choices=PRESETS, default="llama8b-width")
    add("--seq-lens", nargs="+", type=_positive, metavar="T", help="tokens per sequence; default: the preset's")
    add("--layers", type=_positive, help="default: the preset's")
    add("--batch", type=_positive, default=1, help="sequences per process")
    add("--steps", type=_positive, default=10, help="timed steps; their median is reported")
    add("--warmup", type=_positive, default=4, help="steps before them")
    add("--rounds", type=_positive, default=1, help="how often the modes take turns")
    add("--full-step", action=argparse.BooleanOptionalAction, default=True, help="measure with the optimizer too")
    add("--free-running", action="store_true", help="let the host run ahead between steps")
    add("--compile", action="store_true", help="measure each mode again with compiled blocks")
    add("--graph", action="store_true", help="measure each gtp mode again with steps that are CUDA graphs")
    add(
        "--block-graphs", action="store_true", help="measure each eager gtp mode again with blocks that are CUDA graphs"
    )
    add(
        "--recipe",
        nargs="+",
        default=[],
        metavar="NAME[:COMPUTE]",
        help="measure each gtp mode again with the blocks' weights quantized so, e.g. float8_tensorwise, or "
        "float8_tensorwise:dequantize to multiply in bf16; beside them torchao's float8 if it is installed",
    )
    add("--prefetch-depth", type=int, help="of the gtp modes; default: the library's")
    add_schedule_option(parser)
    add_schedule_option(
        parser, "--sweep", "then the gtp modes with each of these in turn, e.g. prefetch_nbytes=0 wgrad_first=False"
    )
    add("--machine", metavar="NAME", help="whose times are predicted: as of gtp-plan; default: the preset of the GPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    add("--trace", type=Path, metavar="DIR", help="write a trace of some steps of each mode, DIR/MODE.T.json")
    add("--trace-device-only", action="store_true", help="of it: no operators, which delay the host")
    add(
        "--fake-ranks",
        type=_positive,
        metavar="N",
        help="without torchrun: be one of so many processes whose collectives communicate nothing, to see what is left "
        "without a wire: compute, host, memory. Forward and backward only",
    )
    add("--host-time", action="store_true", help="measure the host's time per weight use instead")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args()
    try:
        resolved = resolve_modes(arguments.modes)
        alone = [mode for mode in resolved if mode not in BASES]
        plain = [mode for mode in resolved if mode in BASES]
        modes = recipe_modes(plain, arguments.recipe)
        if arguments.compile:
            compiled = {mode: [] if mode in MEGATRON else [mode + COMPILED] for mode in modes}
            modes = [name for mode in modes for name in (mode, *compiled[mode])]
        graphs = []
        if arguments.graph:
            graphs += [mode + GRAPH for mode in modes if mode.startswith("gtp")]
        if arguments.block_graphs:
            graphs += [mode + BLOCK_GRAPHS for mode in plain if mode.startswith("gtp")]
        arguments.modes = list(dict.fromkeys([*modes, *graphs, *alone]))
    except ValueError as error:
        parser.error(str(error))
    if arguments.trace_device_only and arguments.trace is None:
        parser.error("--trace-device-only expects --trace DIR, which says where to")
    if arguments.fake_ranks is not None:
        arguments.full_step = False  # an optimizer would step on what no reduce-scatter has written
    return arguments


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def resolve_modes(names: Iterable[str]) -> list[str]:
    """Replaces a family by its modes: "fsdp2" by "fsdp2-fp32" and "fsdp2-bf16". Other names stay as they are.

    Raises:
        ValueError: if a name is neither a mode nor a family.
    """
    resolved: list[str] = []
    for name in names:
        family = [mode for mode in (*MODES, *MEGATRON) if name == mode.partition("-")[0] and name not in MODES]
        resolved += [mode for mode in family or [name] if mode not in resolved]
    for name in resolved:
        if recipe := Mode.parse(name).recipe:
            make_recipe(recipe)
    return resolved


def make_workload(arguments: argparse.Namespace) -> tuple[Workload, list[int]]:
    """The workload that the command line asks for, and its sequence lengths."""
    preset = dataclasses.asdict(PRESETS[arguments.preset])
    layers, seq_lens = preset.pop("layers"), preset.pop("seq_lens")
    seq_lens = sorted(set(arguments.seq_lens or seq_lens))
    config = LlamaConfig(num_layers=arguments.layers or layers, max_seq_len=seq_lens[-1], **preset)
    schedule = dict(arguments.schedule)
    if arguments.prefetch_depth is not None:
        schedule["prefetch_depth"] = arguments.prefetch_depth
    return Workload(config, arguments.batch, arguments.seed, schedule), seq_lens


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    mode: str,
    seq_len: int,
    leftover: int,
    workload: Workload,
    world: World,
    arguments: argparse.Namespace,
) -> Measurement:
    """Times the first step of a new model, warms it up, times and, if asked, traces it at one length; with an
    optimizer, the full step."""
    step = make_step(model, mode, workload, world, seq_len, optimizer)
    first = FirstStep(model, world, is_reduced=arguments.fake_ranks is None)
    loss = world.mean(step(first.after_backward).item())
    if not math.isfinite(loss):
        raise ArithmeticError(f"mode {mode} has a loss of {loss} at T={seq_len}: times of such a step mean nothing.")
    for _ in range(arguments.warmup - 1 + (_CAPTURE_CALLS if mode.endswith((GRAPH, BLOCK_GRAPHS)) else 0)):
        step()
    meter = MemoryMeter(world, model, optimizer, leftover)
    samples = time_steps(step, world, arguments.steps, free_running=arguments.free_running)
    memory = meter.read(step, symmetric_bytes(model, mode), is_graph=mode.endswith(GRAPH))
    phase = FULL_STEP if optimizer else FORWARD_BACKWARD
    if arguments.trace and phase == FORWARD_BACKWARD:
        path = arguments.trace / f"{mode}.T{seq_len}.json"
        trace_steps(step, world, path, device_only=arguments.trace_device_only)
    predicted = explain_peak(model, optimizer, mode, workload, seq_len, world)
    tokens, activations = workload.batch * seq_len, most_activations(workload, seq_len)
    ms = predict_ms(mode, workload, seq_len, world, arguments) if phase == FORWARD_BACKWARD else None
    return Measurement(
        mode, seq_len, phase, samples, tokens, memory, loss, first.grad_norm, predicted, activations, ms, first.ms
    )


class FirstStep:
    """Times forward and backward of the first step, and reads the gradient norm behind them.

    Args:
        model: the model.
        world: the processes; all make one together.
        is_reduced: whether gradients are reduced; else the norm stays None.
    """

    def __init__(self, model: nn.Module, world: World, *, is_reduced: bool) -> None:
        self._model, self._world, self._is_reduced = model, world, is_reduced
        self.ms = math.nan
        self.grad_norm: float | None = None
        world.barrier()
        self._begin = time.perf_counter()

    def after_backward(self) -> None:
        self._world.synchronize()
        self.ms = self._world.slowest([(time.perf_counter() - self._begin) * 1e3])[0]
        if self._is_reduced:
            self.grad_norm = gradient_norm(self._model, self._world)


def predict_ms(
    mode: str, workload: Workload, seq_len: int, world: World, arguments: argparse.Namespace
) -> float | None:
    """What the planner says of a forward and backward of one sequence; None where it knows mode or machine not."""
    machine = find_machine(arguments.machine, world.device)
    if machine is None or workload.batch > 1:
        return None
    c = workload.config
    sizes = c.dim, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_dim, c.vocab_size
    config, is_fake = ModelConfig("benchmark", *sizes), arguments.fake_ranks is not None
    setting = setting_of(machine, config, world.size, mode, seq_len, workload.schedule, is_fake=is_fake)
    return step_ms(setting, mode, world.size)


def run_mode(
    mode: str, workload: Workload, seq_lens: list[int], world: World, arguments: argparse.Namespace
) -> tuple[list[Measurement], str | None]:
    """Builds one mode for every length and phase, measures it, and frees it.

    Each has a model of its own, because ``gtp_shard`` chooses by the tokens of the first forward. After an error the
    rest of this mode is left out, since a step that broke off leaves a model in no defined state.

    Returns:
        what was measured, and the error if there was one, the same on all ranks.
    """
    measured: list[Measurement] = []
    for phase in (FORWARD_BACKWARD, FULL_STEP) if arguments.full_step else (FORWARD_BACKWARD,):
        for seq_len in seq_lens:
            leftover = release_memory(world)
            model, error = world.guarded(mode, lambda: build_mode(mode, workload, world))
            if model is None:
                return measured, error
            release_memory(world)
            optimizer = None
            if phase == FULL_STEP:
                optimizer, error = world.guarded(mode, partial(build_optimizer, model, mode, world))
                if optimizer is None:
                    return measured, error
            label = f"{mode}, {phase}, T={seq_len}"
            work = partial(measure, model, optimizer, mode=mode, seq_len=seq_len, leftover=leftover)
            result, error = world.guarded(label, partial(work, workload=workload, world=world, arguments=arguments))
            if result is None:
                return measured, f"{label}: {error}"
            world.say(f"{label}: {result.ms:.1f} ms")
            measured.append(result)
            del model, optimizer, work
    return measured, None


def run_modes(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Measures everything, prints the table and returns the content of the JSON file."""
    workload, seq_lens = make_workload(arguments)
    about = environment(world)
    merged: dict[tuple[str, int, str], Measurement] = {}
    errors: dict[str, str] = {}
    world.say(describe(about))
    allocate_workspaces(world)
    for _ in range(arguments.rounds):
        for mode in arguments.modes:
            if mode in errors:
                continue
            measured, error = run_mode(mode, workload, seq_lens, world, arguments)
            if error is not None:
                errors[mode] = error
            for item in measured:
                merged[item.key] = merged[item.key].merged(item) if item.key in merged else item
    results = rows(merged.values())
    world.say("\n" + describe(about) + "\n\n" + step_table(results))
    if explained := memory_lines(merged.values()):
        world.say("\n" + "\n".join(explained))
    for mode, error in errors.items():
        world.say(f"\n{mode} FAILED: {error}")
    settings = {
        "preset": arguments.preset,
        "seq_lens": seq_lens,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "rounds": arguments.rounds,
        "free_running": arguments.free_running,
    }
    return {
        "environment": about,
        "workload": dataclasses.asdict(workload),
        "settings": settings,
        "results": results,
        "errors": errors,
    }


def run_sweep(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """``run_modes``; then the gtp modes with each field of ``--sweep``, and one table of them beside those before."""
    content = run_modes(arguments, world)
    if not arguments.sweep:
        return content
    schedule, content["sweep"] = arguments.schedule, []
    arguments.modes = [mode for mode in arguments.modes if mode.startswith("gtp")]
    base = {(r["mode"], r["seq_len"], r["phase"]): r["ms"] for r in content["results"]}
    lines = []
    for name, value in arguments.sweep:
        field = f"{name}={value}"
        arguments.schedule = [*schedule, (name, value)]
        world.say(f"\n{field}")
        swept = run_modes(arguments, world)
        content["sweep"].append({"field": field, "results": swept["results"]})
        content["errors"] |= {f"{mode} with {field}": error for mode, error in swept["errors"].items()}
        for r in swept["results"]:
            without = base.get((r["mode"], r["seq_len"], r["phase"]))
            peak = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}"
            ratio = "" if without is None else f"{r['ms'] / without:.3f}"
            lines.append([field, str(r["seq_len"]), r["mode"], r["phase"], f"{r['ms']:.1f}", ratio, peak])
    header = ["schedule", "T", "mode", "phase", "ms", "x without", "peak GiB"]
    world.say("\n" + markdown_table(header, sorted(lines, key=lambda line: (int(line[1]), line[2:4]))))
    return content


def main() -> None:
    arguments = parse_arguments()
    world = init_world(arguments.device, fake_size=FAKE_WORLD_SIZE if arguments.host_time else arguments.fake_ranks)
    if arguments.trace_device_only and not world.is_cuda:
        raise ValueError("--trace-device-only expects GPUs; a CPU's trace has nothing but operators and ranges.")
    if arguments.host_time:
        content = measure_host_time(world, arguments.steps, arguments.trace)
        print_host_time(world, content)
    else:
        content = run_sweep(arguments, world)
    if arguments.json is not None and world.rank == 0:
        write_json(arguments.json, content)
    # torchrun ends the others when a process fails; rank 0 must have written its file by then
    world.barrier()
    if content["errors"]:
        raise RuntimeError(f"failed: {', '.join(content['errors'])}; the reasons are above")


if __name__ == "__main__":
    run(main)
