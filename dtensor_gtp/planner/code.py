"""The code of a layout, to paste: meshes, recipes, tensor parallelism, sharding, and how to start it."""

from __future__ import annotations

from .evaluate import Answer, Problem
from .job import Layout
from .user_tp import COLWISE, ROWWISE, TPPlan

_TP_PLAN = """\
# Column- and row-wise slices, activations along the sequence between them; names as in examples/llama.py.
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
)
inputs = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
for block in model.layers:
    parallelize_module(block, mesh["tp"], {
        "attention_norm": SequenceParallel(), "attention": inputs,
        "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(), "ffn": inputs,
        "ffn.w1": ColwiseParallel(), "ffn.w3": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
    })"""


def training_code(problem: Problem, answer: Answer) -> str:
    """Python that builds the meshes and shards the model."""
    job, layout = problem.job, answer.layout
    lines = [
        "import torch",
        "from dtensor_gtp import MixedPrecisionPolicy, SchedulePolicy, gtp_shard, init_weight_mesh",
    ]
    if job.quantization is not None:
        lines.append("from dtensor_gtp import quantize_")
    is_piped = layout.pp > 1
    context = "torch.device('meta')" if is_piped else "mesh.fork_rng('params'), torch.device('meta')"
    lines += ["", *_mesh(layout), f"with {context}:", "    model = build_model()"]
    if job.quantization is not None:
        recipe, _, compute = job.recipe.partition(":")
        if compute:
            cls = type(job.quantization).__name__
            lines.insert(2, f"from dtensor_gtp.quant import {cls}")
            lines.append(f"quantize_(model.layers, {cls}(compute={compute!r}))")
        else:
            lines.append(f"quantize_(model.layers, {recipe!r})")
    if layout.tp > 1:
        lines += [_TP_PLAN] if problem.user is None else _tp_lines(problem.user.plan)
    if layout.checkpoint != "none":
        lines += _checkpointing(layout)
    reduce = "bfloat16" if job.reduce_dtype == "bf16" else "float32"
    lines.append(f"policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduce})")
    schedule = "" if job.memory == "balanced" else f", schedule=SchedulePolicy(memory={job.memory!r})"
    if layout.ep * layout.expert_gtp > 1:
        lines.append("for block in model.layers:  # experts on their own mesh, before the call on the root")
        lines.append("    gtp_shard(block.ffn.experts, mesh.expert_weights, mp_policy=policy)")
    weights = "mesh['replicate', 'gtp']" if is_piped else "mesh.weights"
    lines.append(f"gtp_shard(model, {weights}, mp_policy=policy{schedule})")
    lines += ["model.to_empty(device='cuda')", "model.init_weights()"]
    if job.is_compiled:
        lines.append("for block in model.layers: block.compile(fullgraph=True)")
    if layout.keep:
        num = layout.num_microbatches(job)
        lines += [
            f"# Of {num} microbatches only the last one reduces gradients, and weights stay gathered between them:",
            "# model.set_requires_gradient_sync(is_last); model.set_reshard_after_backward(is_last)",
        ]
    lines.append("optimizer = " + _OPTIMIZERS[job.optimizer])
    return "\n".join(lines)


def _tp_lines(plan: TPPlan) -> list[str]:
    """The plan of a model's own config."""
    styles = {COLWISE: "ColwiseParallel()", ROWWISE: "RowwiseParallel()"}
    return [
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        "parallelize_module(model, mesh['tp'], {  # the config's base_model_tp_plan",
        *(f"    {name!r}: {styles[style]}," for name, style in plan.described().items()),
        "})",
    ]


_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), fused=True)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-2)",
    "sgd-momentum": "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)",
    "muon": "...  # dtensor_gtp.optim.Muon for matrices and AdamW for the rest",
}


def _mesh(layout: Layout) -> list[str]:
    names = ("replicate", "cp", "gtp", "tp", "ep", "expert_gtp")
    sizes = ", ".join(f"{name}={getattr(layout, name)}" for name in names if getattr(layout, name) > 1)
    if layout.pp == 1:
        return [f"mesh = init_weight_mesh('cuda', {sizes})" if sizes else "mesh = init_weight_mesh('cuda')"]
    stage = layout.ranks // layout.pp
    return [
        f"# {layout.pp} stages of {stage} ranks: stage = rank // {stage}. Each stage builds its part of the model and",
        "# shards it; torch.distributed.pipelining runs them (python -m dtensor_gtp.help composability).",
        "import os",
        "from torch.distributed.device_mesh import init_device_mesh",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        f"mesh = init_device_mesh('cuda', ({layout.pp}, {layout.replicate * layout.cp}, {layout.gtp}, {layout.tp}),",
        "                        mesh_dim_names=('pp', 'replicate', 'gtp', 'tp'))",
        "torch.manual_seed(0)  # the same on all ranks: they initialize the same weights",
    ]


def _checkpointing(layout: Layout) -> list[str]:
    lines = ["from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"]
    if layout.checkpoint == "selective":
        lines.append("# with context_fn=create_selective_checkpoint_contexts of a policy that saves every second GEMM")
    return [*lines, "for number, block in enumerate(model.layers): model.layers[number] = checkpoint_wrapper(block)"]


def launch_lines(problem: Problem, answer: Answer) -> str:
    """torchrun and Slurm."""
    host = min(problem.machine.gpus_per_host, answer.layout.ranks)
    nodes = -(-answer.layout.ranks // host)
    if nodes == 1:
        return f"torchrun --nproc-per-node {host} train.py"
    run = f"torchrun --nnodes {nodes} --nproc-per-node {host} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py"
    return f"{run}\nsbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {host} --wrap 'srun {run}'"
