"""What the planner predicts for a mode of ``train_step.py``: time of a forward and backward, and its timeline.

It needs the model's sizes and a machine, and neither processes nor the model itself.
"""

import functools
from dataclasses import replace
from typing import Any

import torch

from dtensor_gtp.planner.costs import Axis, Costs, Load
from dtensor_gtp.planner.machine import Machine, load_machine, preset_of
from dtensor_gtp.planner.model import ModelConfig
from dtensor_gtp.planner.program import Program, build, build_compute
from dtensor_gtp.planner.setting import PARAM_NBYTES, Setting
from dtensor_gtp.planner.timing import build_fully_shard, units_of
from dtensor_gtp.planner.trace import Part, Trace, record_reference, repeated
from dtensor_gtp.policy import SchedulePolicy, fixed_policy
from dtensor_gtp.quant import resolve_recipe
from modes import MEMORY, Mode


def find_machine(text: str | None, device: torch.device) -> Machine | None:
    """The machine that ``--machine`` names, else the preset of the GPU; None if there is none."""
    if text is not None:
        return load_machine(text)
    if device.type != "cuda":
        return None
    preset = preset_of(torch.cuda.get_device_name(device))
    return None if preset is None else load_machine(preset)


@functools.cache
def _trace_of(config: ModelConfig, seq_len: int) -> Trace:
    return repeated(record_reference(config, seq_len), config, Part(tuple(config.kinds)))


class FakeCosts(Costs):
    """Of one process that acts as one of several, whose collectives communicate nothing.

    A gather copies this rank's shard to the place of every rank: the shard is read from memory once and then from the
    cache of the GPU. A reduce-scatter copies this rank's part. Both are kernels beside compute.
    """

    def gather_ms(self, nbytes: float, axis: Axis) -> float:
        return self.memory_ms(nbytes * (1 + 1 / axis.size))

    def scatter_ms(self, nbytes: float, axis: Axis) -> float:
        return self.memory_ms(2 * nbytes / axis.size)

    def load(self, axis: Axis, *, is_copy: bool) -> Load:
        return Load.KERNEL


def setting_of(
    machine: Machine,
    config: ModelConfig,
    ranks: int,
    mode: str,
    seq_len: int,
    schedule: dict[str, Any],
    *,
    is_fake: bool = False,
) -> Setting:
    """How a rank runs a step of ``mode``, a name as the benchmark's tables have it, with one sequence. ``is_fake``: one
    process acts as one of so many."""
    base, _, rest = mode.partition("@")
    name = rest.partition("-")[0]
    plain, _, compute = name.partition(":")
    recipe = resolve_recipe(plain) if plain else None
    precision = "float8" if recipe is not None and not compute and recipe.has_gemms else "bf16"
    if is_fake:  # it has no peers to copy from, and collectives of several tensors are copies of each
        machine = replace(machine, gpus_per_host=1, contention=replace(machine.contention, grouped=1))
    kind = FakeCosts if is_fake else Costs
    costs = kind(machine, {"gtp": Axis(ranks, 1)}, precision, "compiled" in mode, name == "float8_rowwise")
    memory = MEMORY.get(Mode.parse(mode).base)
    if memory is not None and not schedule:
        policy = SchedulePolicy(memory=memory)
    else:
        policy = fixed_policy(**{"embedding": "exchange" if "lookup" in base else "gather"} | schedule)
    reduce_nbytes = 4 if "fp32" in base else 2
    setting = Setting(_trace_of(config, seq_len), costs, policy, reduce_nbytes, recipe, tokens=seq_len)
    return replace(setting, is_captured=mode.endswith("-graph"))


def predict_program(setting: Setting, mode: str) -> Program | None:
    """The simulated step; None for modes that the planner does not know."""
    if mode.startswith("compute"):
        return build_compute(setting)
    if mode.startswith(("fsdp2-bf16", "fsdp2-fp32")) and not mode.endswith(("-tuned", "-symm")):
        return build_fully_shard(setting, keeps=mode.endswith("-kept"))
    if mode.startswith("gtp") and "exchange" not in mode and "blockgraphs" not in mode:
        return build(setting, setting.choice(0)[0])
    return None


def step_ms(setting: Setting, mode: str, ranks: int) -> float | None:
    """Time of the step, in which each of so many ranks waits for the slowest; None for modes that are not known."""
    program = predict_program(setting, mode)
    if program is None:
        return None
    is_alone = mode.startswith("compute") or isinstance(setting.costs, FakeCosts)
    return program.ms * (1 + setting.costs.machine.straggling(1 if is_alone else ranks))


def fully_shard_peak(setting: Setting) -> int:
    """The most bytes above the state in a step of ``fully_shard`` on each block and on the root.

    The root's parameters stay gathered from the begin to the end, and its gradients wait for the end. In backward of a
    block there are two blocks gathered, its own gradients so far, the copy of the last block's gradients that is
    reduced, and the shards' gradients of the blocks before.
    """
    root, units = units_of(setting)
    table, *head = (setting.sharded[number] for number in root.members)
    grads = sum(item.gathered for item in head)
    peaks = [root.gathered + max(item.weight.amounts[:2]) for item in setting.sharded]
    peaks += [root.gathered + item.weight.amounts.before_backward for item in head]
    peaks += [root.gathered + item.gathered + item.weight.amounts.wgrad for item in head]
    reduced = reducing = 0
    for unit in reversed(units):
        ahead = unit.gathered if unit is not units[0] else 0
        computed = 0
        for item in (setting.sharded[number] for number in reversed(unit.members)):
            computed += item.gathered
            held = root.gathered + grads + unit.gathered + ahead + computed + reducing + reduced
            peaks.append(held + max(item.weight.amounts[2:]))
        reduced += unit.shard_numel * PARAM_NBYTES
        reducing = unit.sent
    return max(*peaks, root.gathered + grads + table.gathered + root.sent + reduced)
