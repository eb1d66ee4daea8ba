"""Times the experts of a mixture of experts under ``gtp_shard`` beside their peers, forward and backward.

    torchrun --nproc-per-node 8 examples/benchmarks/moe_block.py --json moe.json
    torchrun --nproc-per-node 2 examples/benchmarks/moe_block.py --preset tiny       # also on a CPU, in seconds

Blocks of experts, one after the other, on rows that are sorted by expert already: grouped GEMMs and the exchange of
weights and gradients, without routing. What is compared:

- ``compute``: ``grouped_mm`` on whole bf16 weights, no communication: the bound;
- ``gtp``: ``gtp_shard`` with its defaults; ``gtp-rows``: the same with rows of every expert on each process;
- ``fsdp2``: ``fully_shard`` on each block, which cuts whole experts; the ratio is to the faster of its modes.

Two stacks of different length are timed. What a further block takes, their difference, is what a block costs amid
others, where gathers have compute to hide behind; the whole stack also has its first gather and its last reduction,
which nothing hides here. Experts lie on the processes in several layouts: expert_gtp processes share the weights of an
expert, ep groups of them have different experts; every process has as many rows in all of them, with counts of its own
that are drawn once from a skewed distribution. All modes have the same initial weights; the mean square of the output
is recorded, on which they agree.

Then a block as a model has it, with router, dispatch and combine, is captured as a CUDA graph and replayed with batches
that are routed differently: output, routing and gradients must have the bits of eager steps.
"""

import argparse
import dataclasses
import faulthandler
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import (  # makes examples/ importable
    World,
    add_schedule_option,
    init_world,
    median,
    release_memory,
    time_steps,
    trace_steps,
)
from launch import UsageError, run
from moe_capture import measure_block
from moe_modes import FSDP2, KEPT, MODES, PRESETS, Layout, build, make_step
from report import describe, environment, markdown_table, write_json

DEFAULT_MODES = ("compute", "gtp", "gtp-rows", "fsdp2")
# With the first layout these, too.
FIRST_MODES = ("compute-buffer", "gtp-graph", "gtp-rows-graph", "fsdp2-rows")
# Of each row: a product in forward and two in backward, of two operations for each element of a weight.
_FLOPS_PER_WEIGHT = 2 * 3
_POINT_MS = 1500.0  # one stack in one mode is timed for about as long
_GOAL_COMPUTE, _GOAL_FSDP2 = 0.9, 1.2


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared with each other."""

    preset: str
    layout: Layout
    tokens: int

    def record(self) -> dict[str, Any]:
        return {"preset": self.preset, "tokens": self.tokens, **dataclasses.asdict(self.layout)}


class Session:
    """Results as they come, and the time that is left.

    Args:
        world: the processes.
        options: the command line.
    """

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.schedule: dict[str, Any] = dict(options.schedule)
        self.results: list[dict[str, Any]] = []
        self.blocks: list[dict[str, Any]] = []
        self.errors: dict[str, str] = {}
        self.skipped: list[str] = []
        self._begin = time.monotonic()
        self._about = environment(world)
        world.say(describe(self._about))
        if self.schedule:
            fields = ", ".join(f"{name}={value!r}" for name, value in self.schedule.items())
            world.say(f"schedule of the gtp modes: {fields}")

    def attempt(self, label: str, work: Callable[[], list[dict[str, Any]]], into: list[dict[str, Any]]) -> None:
        """Adds what ``work`` measures, unless it fails on any process or the time is up."""
        elapsed = self.world.slowest([time.monotonic() - self._begin])[0]  # all processes decide alike
        if elapsed > self.options.budget:
            self.skipped.append(label)
            return
        release_memory(self.world)
        measured, error = self.world.guarded(label, work)
        into += measured or []
        if error is not None:
            self.errors[label] = error
        self.world.say(f"{label}: done after {time.monotonic() - self._begin:.0f} s")
        self.write()

    def write(self) -> None:
        options, path = self.options, self.options.json
        if path is None or self.world.rank != 0:
            return
        settings = {name: getattr(options, name) for name in ("steps", "warmup", "seed")} | {"schedule": self.schedule}
        workloads = {name: dataclasses.asdict(PRESETS[name]) for name in options.preset}
        content = {"environment": self._about, "workloads": workloads, "settings": settings}
        content |= {"results": with_ratios(self.results), "blocks": self.blocks}
        write_json(path, content | {"errors": self.errors, "skipped": self.skipped})


def measure(mode: str, preset_name: str, layout: Layout, session: Session) -> list[dict[str, Any]]:
    """One mode at all numbers of tokens, both stacks."""
    preset, world, options = PRESETS[preset_name], session.world, session.options
    model = build(mode, preset, layout, layout.mesh(world), world, options.seed, session.schedule)
    results = []
    for tokens in options.tokens or preset.tokens:
        loss, samples = 0.0, {}
        for num_blocks in preset.blocks:
            step = make_step(model, mode, preset, layout, tokens, num_blocks, world, options.seed)
            loss = world.mean(step().item())
            if not math.isfinite(loss):
                raise ValueError(f"measure expects a finite mean square of the output, but got {loss}.")
            is_captured = "-graph" in mode and world.is_cuda
            for _ in range(options.warmup - 1 + 3 * is_captured):  # capture_step has eager steps of its own before
                step()
            (probe,) = time_steps(step, world, 1, free_running=False)
            steps = min(options.steps, max(3, int(_POINT_MS / probe)))
            samples[num_blocks] = time_steps(step, world, steps, free_running=False)
            if options.trace is not None and num_blocks == max(preset.blocks):
                name = f"{preset_name}.gtp{layout.expert_gtp}.{mode}.T{tokens}.json"
                trace_steps(step, world, options.trace / name)
            del step
            release_memory(world)
        short, long = preset.blocks
        ms = median(samples[long])
        further = (ms - median(samples[short])) / (long - short)
        tflops = _FLOPS_PER_WEIGHT * preset.weights_per_token * tokens * long / ms / 1e9
        record = Setting(preset_name, layout, tokens).record() | {"mode": mode, "blocks": long, "ms": ms}
        record |= {"ms_per_further_block": further, "tflops": tflops, "loss": loss, "samples_ms": samples}
        results.append(record)
        world.say(f"{label_of(record)}: {long} blocks {ms:.2f} ms, a further block {further:.2f} ms")
    return results


def label_of(record: dict[str, Any]) -> str:
    return f"{record['preset']}, expert_gtp={record['expert_gtp']}, {record['tokens']} tokens, {record['mode']}"


def with_ratios(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each record with ``of_compute``, the bound's time over its own, and ``x_fsdp2``, that of the faster fsdp2 mode
    over its own; the same of what a further block takes. None where there is no such peer."""
    measured = list(results)
    same = ("preset", "tokens", "expert_gtp")
    records = []
    for record in measured:
        peers = [r for r in measured if all(r[key] == record[key] for key in same)]
        ratios: dict[str, float | None] = {}
        for key, suffix in (("ms", ""), ("ms_per_further_block", "_further")):
            for name, modes in (("of_compute", ("compute",)), ("x_fsdp2", FSDP2)):
                best = min((r[key] for r in peers if r["mode"].removesuffix(KEPT) in modes), default=-1.0)
                # On a busy machine a difference of two times may be negative.
                ratios[name + suffix] = best / record[key] if best > 0 and record[key] > 0 else None
        records.append(record | ratios)
    return records


def table(records: list[dict[str, Any]]) -> str:
    lines = [
        [
            r["preset"],
            f"{r['expert_gtp']} x {r['ep']}",
            str(r["tokens"]),
            r["mode"],
            f"{r['ms']:.2f}",
            _ratio(r["of_compute"]),
            _ratio(r["x_fsdp2"]),
            f"{r['ms_per_further_block']:.2f}",
            _ratio(r["of_compute_further"]),
            _ratio(r["x_fsdp2_further"]),
        ]
        for r in sorted(records, key=lambda r: (list(PRESETS).index(r["preset"]), -r["expert_gtp"], r["tokens"]))
    ]
    header = ["preset", "expert_gtp x ep", "tokens/GPU", "mode", "stack ms", "of compute", "fsdp2 / it"]
    return markdown_table([*header, "further block ms", "of compute", "fsdp2 / it"], lines)


def block_table(blocks: list[dict[str, Any]]) -> str:
    lines = [
        [
            r["preset"],
            f"{r['expert_gtp']} x {r['ep']}",
            str(r["tokens"]),
            f"{r['eager_ms']:.2f}",
            f"{r['graph_ms']:.2f}",
            "yes" if r["is_captured"] else "no GPU",
            "yes" if r["is_rerouted"] else "NO",
            "yes" if r["is_bit_equal"] else f"NO: {', '.join(r['differences']) or 'on another process'}",
        ]
        for r in blocks
    ]
    header = ["preset", "expert_gtp x ep", "tokens/GPU", "eager ms", "graph ms", "captured", "rerouted", "bit-equal"]
    return markdown_table(header, lines)


def goals(records: list[dict[str, Any]]) -> list[str]:
    """For each setting the best gtp mode beside what it should reach."""
    lines = []
    for key in dict.fromkeys((r["preset"], r["expert_gtp"], r["tokens"]) for r in records):
        own = [r for r in records if (r["preset"], r["expert_gtp"], r["tokens"]) == key and r["mode"][:3] == "gtp"]
        texts = []
        for name, goal in (("of_compute", _GOAL_COMPUTE), ("x_fsdp2", _GOAL_FSDP2)):
            for suffix, what in (("", "stack"), ("_further", "further block")):
                known = [(r[name + suffix], r["mode"]) for r in own if r[name + suffix] is not None]
                if known:
                    value, mode = max(known)
                    verdict = "reached" if value >= goal else "MISSED"
                    texts.append(f"{name} {value:.2f} ({mode}, {what}; goal {goal} {verdict})")
        if texts:
            lines.append(f"{key[0]}, expert_gtp={key[1]}, {key[2]} tokens: {'; '.join(texts)}")
    return lines


def _ratio(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def layouts_of(options: argparse.Namespace, world: World, name: str) -> list[Layout]:
    sizes = options.expert_gtp or sorted({world.size, min(world.size, 2)}, reverse=True)
    try:
        return [Layout.of(world, size, PRESETS[name]) for size in sizes]
    except ValueError as error:
        raise UsageError(str(error)) from error


def measure_stacks(session: Session) -> None:
    """The first layout of every preset before the others."""
    world, options = session.world, session.options
    layouts = {name: layouts_of(options, world, name) for name in options.preset}
    for number in range(max(map(len, layouts.values()))):
        for name in options.preset:
            layout = layouts[name][number]
            for mode in options.modes or (*DEFAULT_MODES, *(() if number else FIRST_MODES)):
                label = f"{name}, expert_gtp={layout.expert_gtp}, {mode}"
                session.attempt(label, lambda m=mode, n=name, to=layout: measure(m, n, to, session), session.results)
        if number == 0 and not options.no_block:
            measure_blocks(session)


def measure_blocks(session: Session) -> None:
    """The captured block at all numbers of tokens, and with experts over ep=2 at the smallest."""
    world, options = session.world, session.options
    for name in options.preset:
        preset, tokens = PRESETS[name], options.tokens or PRESETS[name].tokens
        settings = [Setting(name, Layout(1, world.size), count) for count in tokens]
        if world.size % 2 == 0 and preset.num_experts % 2 == 0:
            settings.append(Setting(name, Layout(2, world.size // 2), min(tokens)))
        for setting in settings:
            label = f"{name}, block, ep={setting.layout.ep}, {setting.tokens} tokens"

            def work(setting: Setting = setting) -> list[dict[str, Any]]:
                size = (PRESETS[setting.preset], setting.layout, setting.tokens)
                measured = measure_block(*size, world, options.seed, options.steps, session.schedule)
                return [setting.record() | measured]

            session.attempt(label, work, session.blocks)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", nargs="+", choices=PRESETS, default=["deepseek-v2-lite", "mixtral"])
    add("--modes", nargs="+", choices=MODES, help="default: a choice that takes the budget")
    add("--tokens", nargs="+", type=int, metavar="T", help="tokens of each process; default: the preset's")
    add("--expert-gtp", nargs="+", type=int, metavar="N", help="processes of each expert; default: all, and 2")
    add_schedule_option(parser)
    add("--no-block", action="store_true", help="without the block that is captured")
    add("--steps", type=int, default=10, help="timed steps at most; their median is reported")
    add("--warmup", type=int, default=3, help="steps before them")
    add("--budget", type=float, default=140.0, metavar="S", help="seconds after which nothing more is begun")
    add("--limit", type=float, default=400.0, metavar="S", help="seconds after which the process ends, whatever hangs")
    add("--trace", type=Path, metavar="DIR", help="write a trace of three steps of rank 0 for each mode and size")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    world = init_world(options.device)
    session = Session(world, options)
    measure_stacks(session)
    records = with_ratios(session.results)
    if records:
        world.say("\n" + table(records) + "\n\n" + "\n".join(goals(records)))
    if session.blocks:
        world.say("\n" + block_table(session.blocks))
    if session.skipped:
        world.say(f"\nno time for: {'; '.join(session.skipped)}")
    different = [f"{r['preset']}, {r['tokens']} tokens" for r in session.blocks if not r["is_bit_equal"]]
    if different:
        session.errors["block"] = f"captured steps differ from eager ones: {'; '.join(different)}"
    session.write()
    world.barrier()
    faulthandler.cancel_dump_traceback_later()
    if session.errors:
        raise RuntimeError(f"failed: {session.errors}")


if __name__ == "__main__":
    run(main)
