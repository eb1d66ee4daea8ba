"""The code of a layout, to paste: meshes, recipes, tensor parallelism, sharding, a step, and how to start it.

A test runs what stands here on processes of gloo and compares a step with one process. What it does not write it says.
"""

from __future__ import annotations

from .evaluate import Answer, Problem
from .job import Layout
from .user_model import COLWISE, ROWWISE, TPPlan

_TP_PLAN = """\
# Column- and row-wise slices, activations along the sequence between them; names as in examples/llama.py.
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel, parallelize_module,
)
whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
parallelize_module(model, mesh["tp"], {
    "embedding": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
})
for block in model.layers:
    parallelize_module(block, mesh["tp"], {
        "attention_norm": SequenceParallel(), "attention": whole,
        "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(), "ffn": whole,
        "ffn.w1": ColwiseParallel(), "ffn.w3": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
    })"""

_SELECTIVE = """\
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

def save_every_second_product():
    seen = {False: 0, True: 0}  # in forward, and in recomputation
    def policy(context, op, *args, **kwargs):
        is_saved = "attention" in str(op)
        if op is torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            is_saved = seen[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(policy)
"""


_CHECKPOINTING = """\
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
for number, block in enumerate(model.layers):
    model.layers[number] = checkpoint_wrapper(block{options})"""

_ZERO1 = """\
from torch.distributed.fsdp import fully_shard
for unit in (*model.layers, model):  # gradients and optimizer states are cut over the copies too
    fully_shard(unit, mesh=mesh["replicate"], reshard_after_forward=False)"""

_READ = "python -m dtensor_gtp.help"


def unwritten(problem: Problem, answer: Answer) -> list[str]:
    """What of a layout this file writes no code for, and where to read on."""
    layout = answer.layout
    found = []
    if layout.pp > 1:
        found.append(f"pp {layout.pp}: how the model is cut into stages is yours, see {_READ} composability")
    if layout.cp > 1:
        exchanged = "attention exchanges keys over mesh['cp'] in your code"
        found.append(f"cp {layout.cp}: {exchanged}, see {_READ} composability")
    if _cuts_states(problem, layout) and layout.keep:
        found.append("zero1: fully_shard frees what is kept for all microbatches, take a larger --micro-batch")
    if layout.ep * layout.expert_gtp > 1 or (problem.config is not None and problem.config.experts):
        found.append(f"experts: where they are in the model is yours, see {_READ} moe")
    if layout.checkpoint == "selective" and problem.job.quantization is not None:
        found.append("selective checkpointing of quantized weights: this package has none, take --checkpointing full")
    return found


def _cuts_states(problem: Problem, layout: Layout) -> bool:
    return problem.job.shards_optimizer and layout.replicate > 1


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
        lines += [_TP_PLAN] if problem.user is None else _tp_lines(problem.user.plan)
    if layout.checkpoint != "none":
        is_selective = layout.checkpoint == "selective"
        options = ", context_fn=save_every_second_product, preserve_rng_state=False" * is_selective
        lines += [_SELECTIVE] * is_selective + [_CHECKPOINTING.format(options=options)]
    reduce = "bfloat16" if job.reduce_dtype == "bf16" else "float32"
    lines.append(f"policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduce})")
    schedule = "" if job.memory == "balanced" else f", schedule=SchedulePolicy(memory={job.memory!r})"
    copies = "mesh['gtp']" if _cuts_states(problem, layout) else "mesh.weights"
    lines.append(f"gtp_shard(model, {copies}, mp_policy=policy{schedule})")
    lines += [_ZERO1] * _cuts_states(problem, layout)
    lines += [
        "model.to_empty(device='cuda')",
        "with mesh.fork_rng('params'):  # the same values whatever the mesh",
        "    model.init_weights()  # yours, as in examples/llama.py",
    ]
    if job.is_compiled:
        lines.append("for block in model.layers:\n    block.compile(fullgraph=True)")
    lines += [*_OPTIMIZERS[job.optimizer], "", *_step(problem, layout)]
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
    elif _cuts_states(problem, layout) and num > 1:
        lines.append("        model.set_requires_gradient_sync(number + 1 == len(microbatches))  # that of fully_shard")
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


_OPTIMIZERS = {
    "adamw": ["optimizer = torch.optim.AdamW(model.parameters(), fused=True)"],
    "sgd": ["optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)"],
    "sgd-momentum": ["optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)"],
    "muon": [
        "from dtensor_gtp.optim import Muon",
        "matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and name.startswith('layers.')]",
        "others = [p for name, p in model.named_parameters() if p.ndim < 2 or not name.startswith('layers.')]",
        "muon, adamw = Muon(matrices, lr=1e-3), torch.optim.AdamW(others, fused=True)",
    ],
}


def launch_lines(problem: Problem, answer: Answer) -> str:
    """torchrun and Slurm."""
    host = min(problem.machine.gpus_per_host, answer.layout.ranks)
    nodes = -(-answer.layout.ranks // host)
    if nodes == 1:
        return f"torchrun --nproc-per-node {host} train.py"
    run = f"torchrun --nnodes {nodes} --nproc-per-node {host} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py"
    return f"{run}\nsbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {host} --wrap 'srun {run}'"
