"""The code of a layout, to paste: meshes, recipes, tensor parallelism, sharding, a step, and how to start it.

A test runs what stands here on processes of gloo and compares a step with one process. What it does not write it says.
"""

from __future__ import annotations

from pathlib import Path

from .evaluate import Answer, Problem
from .job import Layout
from .user_model import COLWISE, ROWWISE, TPPlan

_SNIPPETS = Path(__file__).parent / "snippets"
_READ = "python -m dtensor_gtp.help"


def _snippet(name: str) -> str:
    return (_SNIPPETS / f"{name}.txt").read_text().rstrip()


def unwritten(problem: Problem, answer: Answer) -> list[str]:
    """What of a layout this file writes no code for, and where to read on."""
    layout = answer.layout
    found = []
    if layout.pp > 1:
        found.append(f"pp {layout.pp}: how the model is cut into stages is yours, see {_READ} composability")
    if layout.cp > 1:
        exchanged = "attention exchanges keys over mesh['cp'] in your code"
        found.append(f"cp {layout.cp}: {exchanged}, see {_READ} composability")
    if layout.ep * layout.expert_gtp > 1 or (problem.config is not None and problem.config.experts):
        found.append(f"experts: where they are in the model is yours, see {_READ} moe")
    if layout.checkpoint == "selective" and problem.job.quantization is not None:
        found.append("selective checkpointing of quantized weights: this package has none, take --checkpointing full")
    return found


def training_code(problem: Problem, answer: Answer) -> str:
    """Python that builds the meshes, shards the model and runs a step; comments alone for what it cannot write."""
    if missing := unwritten(problem, answer):
        lines = [f"# No code for this layout ({answer.layout.describe()}):"]
        return "\n".join([*lines, *(f"#   {text}" for text in missing)])
    job, layout = problem.job, answer.layout
    names = "MixedPrecisionPolicy, SchedulePolicy, gtp_shard, init_weight_mesh"
    lines = ["import torch", f"from dtensor_gtp import {names}"]
    if job.quantization is not None:
        lines.append("from dtensor_gtp import quantize_")
    sizes = [f", {name}={getattr(layout, name)}" for name in ("replicate", "gtp", "tp") if getattr(layout, name) > 1]
    lines += ["", f"mesh = init_weight_mesh('cuda'{''.join(sizes)})", ""]
    lines += ["with torch.device('meta'):", "    model = build_model()  # yours"]
    lines += _recipe(problem)
    if layout.tp > 1:
        lines += [_snippet("tensor_parallel")] if problem.user is None else _tp_lines(problem.user.plan)
    if layout.checkpoint != "none":
        is_selective = layout.checkpoint == "selective"
        options = ", context_fn=save_every_second_product, preserve_rng_state=False" * is_selective
        lines += [_snippet("selective") + "\n"] * is_selective
        lines.append(_snippet("checkpointing").format(options=options))
    reduce = "bfloat16" if job.reduce_dtype == "bf16" else "float32"
    lines.append(f"policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduce})")
    schedule = "" if job.memory == "balanced" else f", schedule=SchedulePolicy(memory={job.memory!r})"
    states = ", shard_optimizer=True" * (job.shards_optimizer and layout.replicate > 1)
    lines.append(f"gtp_shard(model, mesh.weights, mp_policy=policy{schedule}{states})")
    lines += [
        "model.to_empty(device='cuda')",
        "with mesh.fork_rng('params'):  # the same values whatever the mesh",
        "    model.init_weights()  # yours: it writes each parameter",
    ]
    if job.is_compiled:
        lines.append("for block in model.layers:\n    block.compile(fullgraph=True)")
    lines += [_snippet(job.optimizer), "", *_step(problem, layout)]
    return "\n".join(lines)


def _recipe(problem: Problem) -> list[str]:
    recipe, _, compute = problem.job.recipe.partition(":")
    if problem.job.quantization is None:
        return []
    if not compute:
        return [f"quantize_(model.layers, {recipe!r})"]
    cls = type(problem.job.quantization).__name__
    return [f"from dtensor_gtp.quant import {cls}", f"quantize_(model.layers, {cls}(compute={compute!r}))"]


def _step(problem: Problem, layout: Layout) -> list[str]:
    """One optimizer step over the microbatches of this rank."""
    num = layout.num_microbatches(problem.job)
    names = ("muon", "adamw") if problem.job.optimizer == "muon" else ("optimizer",)
    data = f"of {layout.data_ranks} data ranks"
    if layout.tp > 1:
        data += f", the same on the {layout.tp} ranks of tp"
    lines = [
        f"def train_step(microbatches):  # {num} of {layout.micro_batch} sequences, {data}",
        "    for number, batch in enumerate(microbatches):",
    ]
    if layout.keep:
        lines += [
            "        is_last = number + 1 == len(microbatches)",
            "        model.set_requires_gradient_sync(is_last)  # gradients are reduced once a step",
            "        model.set_reshard_after_forward(is_last)  # weights stay gathered until then",
            "        model.set_reshard_after_backward(is_last)",
        ]
    elif layout.replicate > 1 and num > 1:
        lines.append("        model.set_requires_all_reduce(number + 1 == len(microbatches))")
    return [
        *lines,
        "        loss = compute_loss(model, batch) / len(microbatches)  # yours: the mean over its tokens",
        "        loss.backward()",
        *(f"    {name}.step()\n    {name}.zero_grad()" for name in names),
    ]


def _tp_lines(plan: TPPlan) -> list[str]:
    styles = {COLWISE: "ColwiseParallel()", ROWWISE: "RowwiseParallel()"}
    return [
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        "parallelize_module(model, mesh['tp'], {  # the config's base_model_tp_plan",
        *(f"    {name!r}: {styles[style]}," for name, style in plan.described().items()),
        "})",
    ]


def launch_lines(problem: Problem, answer: Answer) -> str:
    """torchrun and Slurm."""
    host = min(problem.machine.gpus_per_host, answer.layout.ranks)
    nodes = -(-answer.layout.ranks // host)
    if nodes == 1:
        return f"torchrun --nproc-per-node {host} train.py"
    run = f"torchrun --nnodes {nodes} --nproc-per-node {host} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py"
    return f"{run}\nsbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {host} --wrap 'srun {run}'"
