"""Python for a layout, and the lines that start it.

A test runs the code on processes of gloo and compares a step with one process. What is not written, it says.
"""

from __future__ import annotations

import re
from pathlib import Path

from .evaluate import Answer, Problem
from .job import Layout
from .model import ModelConfig
from .user_model import UserModel

_SNIPPETS = Path(__file__).parent / "snippets"
_READ = "python -m dtensor_gtp.help"


def _snippet(name: str) -> str:
    return (_SNIPPETS / f"{name}.txt").read_text().rstrip()


def _blocks(problem: Problem) -> list[str]:
    """Where the blocks are in the model."""
    return list(dict.fromkeys(w.block_name.rpartition(".")[0] for w in problem.whole.weights if w.block >= 0))


def _unwritten(problem: Problem, layout: Layout) -> list[str]:
    """What of a layout this file writes no code for, and where to read on."""
    job, blocks = problem.job, _blocks(problem)
    changes_blocks = layout.checkpoint != "none" or job.is_compiled or job.recipe != "bf16" or job.optimizer == "muon"
    is_mixture = layout.ep * layout.expert_gtp > 1 or problem.model.experts > 0
    is_selective = layout.checkpoint == "selective" and job.quantization is not None
    places = f"in {len(blocks)} places ({', '.join(blocks)})" if blocks else "nowhere by number"
    on_axes = f"see {_READ} composability"
    notes = {
        f"pp {layout.pp}: how the model is cut into stages is yours, {on_axes}": layout.pp > 1,
        f"cp {layout.cp}: attention exchanges keys over mesh['cp'] in your code, {on_axes}": layout.cp > 1,
        f"experts: where they are in the model is yours, see {_READ} moe": is_mixture,
        "selective checkpointing of quantized weights: this package has none, take --checkpointing full": is_selective,
        f"blocks stand {places}: what is done to each is yours, {on_axes}": changes_blocks and len(blocks) != 1,
    }
    return [note for note, is_needed in notes.items() if is_needed]


def training_code(problem: Problem, answer: Answer) -> str:
    """Python that builds the meshes, shards the model and runs a step; comments alone for what it cannot write."""
    job, layout = problem.job, answer.layout
    if missing := _unwritten(problem, layout):
        return "\n#   ".join([f"# No code for this layout ({layout.describe()}):", *missing])
    sizes = [f", {name}={getattr(layout, name)}" for name in ("replicate", "gtp", "tp") if getattr(layout, name) > 1]
    num, sync = layout.num_microbatches(job), ""
    if layout.keep:
        sync = _snippet("keep") + "\n"
    elif layout.replicate > 1 and num > 1:
        sync = "        model.set_requires_all_reduce(number + 1 == len(microbatches))\n"
    blocks = next(iter(_blocks(problem)), "")
    module = f"model.{blocks}" if blocks else "model"
    # With tp, torch 2.13 compiles no recomputation: it is around what is compiled.
    inner = "._checkpoint_wrapped_module" * (layout.tp > 1 and layout.checkpoint == "full")
    compiled = f"for block in {module}:\n    block{inner}.compile(fullgraph=True)\n"
    optimizers = ("muon", "adamw") if job.optimizer == "muon" else ("optimizer",)
    return _snippet("training").format(
        imports="" if job.quantization is None else "from dtensor_gtp import quantize_\n",
        sizes="".join(sizes),
        changes="".join(f"{lines}\n" for lines in _changes(problem, layout, module)),
        reduce="bfloat16" if job.reduce_dtype == "bf16" else "float32",
        schedule="" if job.memory == "balanced" else f", schedule=SchedulePolicy(memory={job.memory!r})",
        states=", shard_optimizer=True" * (job.shards_optimizer and layout.replicate > 1),
        compiled=compiled * job.is_compiled,
        optimizer=_snippet(job.optimizer).replace("layers.", f"{blocks}." if blocks else ""),
        num=num,
        size=layout.micro_batch,
        data=f"{layout.data_ranks} data ranks" + f", the same on the {layout.tp} ranks of tp" * (layout.tp > 1),
        sync=sync,
        steps="\n".join(f"    {name}.step()\n    {name}.zero_grad()" for name in optimizers),
    )


def _changes(problem: Problem, layout: Layout, blocks: str) -> list[str]:
    """What changes the model before it is sharded."""
    found = []
    if (recipe := problem.job.quantization) is not None:
        name, _, compute = problem.job.recipe.partition(":")
        given = repr(name)
        if compute:
            kind = type(recipe).__name__
            found, given = [f"from dtensor_gtp.quant import {kind}"], f"{kind}(compute={compute!r})"
        found.append(f"quantize_({blocks}, {given})")
    model = problem.model
    if layout.tp > 1 and isinstance(model, ModelConfig):
        found.append(_snippet("tensor_parallel"))
    elif layout.tp > 1 and isinstance(model, UserModel):
        by_name = {re.sub(r"(^|\.)\d+\.", r"\1*.", name): style for name, style in model.plan.styles.items()}
        styles = (f"    {name!r}: {style.title()}Parallel()," for name, style in by_name.items())
        found.append(_snippet("plan_of_names").format(styles="\n".join(styles)))
    options = ""
    if layout.checkpoint == "selective":
        options = ", context_fn=save_every_second_product, preserve_rng_state=False"
        found.append(_snippet("selective") + "\n")
    if layout.checkpoint != "none":
        found.append(_snippet("checkpointing").format(options=options, blocks=blocks))
    return found


def launch_lines(problem: Problem, answer: Answer) -> str:
    """torchrun and Slurm, as comments."""
    host = min(problem.machine.gpus_per_host, answer.layout.ranks)
    nodes = -(-answer.layout.ranks // host)
    if nodes == 1:
        return f"# torchrun --nproc-per-node {host} train.py"
    run = f"torchrun --nnodes {nodes} --nproc-per-node {host} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py"
    return f"# {run}\n# sbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {host} --wrap 'srun {run}'"
