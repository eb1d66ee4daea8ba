"""Trains a Llama-style byte-level language model with ``gtp_shard``.

    torchrun --nproc-per-node 4 examples/train_llama.py

needs no argument, no download and no GPU: the text is the source code of Python's standard library. Without GPUs a
small model trains for about a minute on gloo; with one GPU per process a larger one trains in bf16 on NCCL, by the same
code. ``python examples/train_llama.py`` runs it in a single process. ``--resume`` continues from the last complete
checkpoint on any number of processes, with the same data order; on as many processes as before, bit for bit.
``--exchange`` leaves the embedding and the output projection sharded while they are used.

    torchrun --max-restarts 3 --nproc-per-node 7 examples/train_llama.py --elastic 4

trains replicas of four processes, the last of which has three, and goes on by itself when torchrun starts the job again
after a failure, on as many processes as are left: with what the processes that did not fail leave in memory when they
are told to end, which loses the step in flight; where that is not all, with the last checkpoint.
"""

import argparse
import os
import sys
import threading

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import training
from checkpoints import TrainState
from dtensor_gtp import SchedulePolicy, elastic, gtp_shard
from dtensor_gtp.nn.functional import linear_cross_entropy
from launch import Farewell, Place, UsageError, run, start
from llama import Llama, LlamaConfig
from text_data import VOCAB_SIZE, Batch, Corpus, load_corpus
from training import MAX_GRAD_NORM, Preset, add_options, mixed_precision, use_deterministic_kernels

PRESETS = {
    "tiny": Preset(
        LlamaConfig(VOCAB_SIZE, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=80, max_seq_len=32),
        steps=10, batch_size=12, lr=1e-2, checkpoint_every=5, log_every=1, warmup_steps=2, eval_batches=2,
    ),
    "cpu": Preset(
        LlamaConfig(VOCAB_SIZE, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=352, max_seq_len=128),
        steps=150, batch_size=24, lr=4e-3, checkpoint_every=50, log_every=10, warmup_steps=20, eval_batches=4,
    ),
    "gpu": Preset(
        LlamaConfig(
            VOCAB_SIZE, dim=1024, num_layers=16, num_heads=16, num_kv_heads=4, hidden_dim=2816, max_seq_len=1024
        ),
        steps=600, batch_size=24, lr=1e-3, checkpoint_every=200, log_every=10, warmup_steps=50, eval_batches=8,
    ),
}  # fmt: skip


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level Llama-style model with gtp_shard.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="model and defaults; gpu where each process has a GPU, else cpu")
    add("--replicate", type=int, default=1, help="copies of the sharded model: the mesh becomes (replicate, gtp)")
    add("--elastic", type=int, metavar="N", help="replicas of N processes, the last one of what is left; auto-resume")
    add("--exchange", action="store_true", help="exchange activations, not weights, for the embedding and the loss")
    add_options(parser, "checkpoints/train_llama")
    return parser.parse_args(arguments)


def resolve_preset(options: argparse.Namespace, place: Place) -> Preset[LlamaConfig]:
    """The chosen preset with the options of the command line in place of its defaults."""
    return training.resolve_preset(PRESETS, options, place)


def build_mesh(place: Place, replicate: int) -> DeviceMesh:
    """A (gtp) mesh over all processes, or (replicate, gtp) with several copies of the sharded model."""
    if replicate < 1 or place.world_size % replicate:
        raise UsageError(f"--replicate {replicate} does not divide the {place.world_size} processes of this job.")
    if replicate == 1:
        return init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("gtp",))
    shape = (replicate, place.world_size // replicate)
    return init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "gtp"))


def build_replicas(place: Place, size: int, replicate: int) -> elastic.ElasticMesh:
    """Replicas of ``size`` consecutive processes; the last one has those that are left."""
    if size < 1 or replicate != 1:
        raise UsageError(f"expected --elastic of at least 1 and no --replicate, but got {size} and {replicate}.")
    ranks = range(place.world_size)
    replicas = [ranks[first : first + size] for first in range(0, place.world_size, size)]
    return elastic.nonuniform_mesh(place.device.type, replicas=replicas)


def build_model(config: LlamaConfig, mesh: DeviceMesh, place: Place, options: argparse.Namespace) -> Llama:
    """Builds the model without memory, shards it, and only then initializes each process's shards.

    Each process draws the numbers that the whole model would have drawn and keeps its own, so a seed means the same
    initial model on any number of processes, and no process ever holds all of it.
    """
    with torch.device("meta"):
        model = Llama(config)
    schedule = SchedulePolicy(memory=options.memory, embedding="exchange" if options.exchange else "auto")
    gtp_shard(model, mesh, mp_policy=mixed_precision(place), schedule=schedule)
    model.to_empty(device=place.device)
    torch.manual_seed(options.seed)
    model.init_weights()
    # From here on every process draws its own numbers, as its data are its own.
    torch.manual_seed(options.seed + 1 + place.rank)
    return model


class Trainer(training.Trainer):
    """The shared loop on one mesh, or on replicas that need not be alike."""

    def __init__(self, options: argparse.Namespace, preset: Preset[LlamaConfig], place: Place, corpus: Corpus) -> None:
        self.replicas: elastic.ElasticMesh | None = None
        self.exchanges = options.exchange
        if options.exchange and options.elastic is not None:
            raise UsageError("--exchange needs equal replicas: leave out --elastic.")
        share = None
        if options.elastic is None:
            mesh = build_mesh(place, options.replicate)
        else:
            self.replicas = build_replicas(place, options.elastic, options.replicate)
            mesh, share = self.replicas.weights, share_of(self.replicas, preset)
            place.print_once(self.replicas.layout)
        model = build_model(preset.model, mesh, place, options)
        if self.replicas is not None and share is not None:
            elastic.synchronize_replicas(model, self.replicas).set_batch(share)
        # What the mean of this rank's rows counts in the mean over ranks.
        weight = 1.0 if share is None else share.num_samples * place.world_size / preset.batch_size
        rows = None if share is None else share.rows
        super().__init__(options, preset, place, corpus, model, rows=rows, weight=weight)
        # Held while the weights change: what is left to the next process is the state between two steps.
        self.updating = threading.Lock()
        self.is_whole = False
        self.updated = torch.cuda.Event() if place.device.type == "cuda" else None
        self.handover = None if self.replicas is None else elastic.handover_path()
        self.held = None if self.handover is None else elastic.take_state(self.handover)
        is_held = torch.tensor(float(self.held is not None), device=place.device)
        self.is_recovering = self.replicas is not None and place.mean_over_ranks(is_held) > 0
        # Where there is a checkpoint, torchrun has started this job again.
        has_checkpoint = self.replicas is not None and self.checkpoints.latest() is not None
        self.is_resuming |= has_checkpoint or self.is_recovering

    def update(self) -> None:
        if self.updated is not None and self.handover is not None:
            torch.cuda.synchronize()  # an update that waits for a peer that is gone must not have been launched
        with self.updating:
            super().update()
            if self.updated is not None:
                self.updated.record()

    def leave(self) -> None:
        """Leaves what this process holds to the one that torchrun starts in its place; no update follows it."""
        is_last = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        if self.handover is None or is_last:
            return
        self.updating.acquire()
        if not self.is_whole:  # still being recovered: what has come is passed on
            if self.held is not None:
                elastic.leave_state(self.held, self.handover)
            return
        # Of this process's device: a thread begins with the first one.
        stream = None if self.updated is None else torch.cuda.Stream(self.place.device)
        with torch.cuda.stream(stream):  # not behind a collective that never ends
            if stream is not None and self.updated is not None:
                stream.wait_event(self.updated)
            state = TrainState(self.model, self.optimizer, self.scheduler, self.place).state_dict()
            elastic.leave_state(elastic.hold_state(state, step=self.step), self.handover)

    def resume(self) -> None:
        """Continues from memory where the processes before have left all of the state, else from a checkpoint."""
        if self.is_recovering and self.recover():
            return
        if self.is_recovering and self.checkpoints.latest() is None:
            return
        super().resume()

    def train(self) -> None:
        self.is_whole, self.held = True, None
        super().train()

    def recover(self) -> bool:
        assert self.replicas is not None
        state = TrainState(self.model, self.optimizer, self.scheduler, self.place)
        values = state.state_dict()
        try:
            self.step = elastic.recover_state(self.held, values, self.replicas)
        except elastic.StateLostError:
            self.optimizer.state.clear()  # state_dict() has made one, which counts a step
            return False
        state.load_state_dict(values)
        self.place.print_once(f"recovered step {self.step} from memory")
        return True

    def loss(self, batch: Batch) -> torch.Tensor:
        if not self.exchanges:
            return super().loss(batch)
        # The vocabulary stays sharded: logits are never whole.
        return self.model(batch.inputs, lambda hidden, output: linear_cross_entropy(hidden, output, batch.targets))

    def clip_grad_norm(self) -> torch.Tensor:
        if self.replicas is None:
            return super().clip_grad_norm()
        return elastic.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM, self.replicas)

    def save_planner(self) -> dcp.SavePlanner | None:
        # Unequal replicas hold overlapping chunks: one of them writes.
        return None if self.replicas is None else elastic.ReplicaSavePlanner(self.replicas)


def share_of(replicas: elastic.ElasticMesh, preset: Preset[LlamaConfig]) -> elastic.BatchShare:
    """This rank's rows where replicas are unequal."""
    try:
        return replicas.rebalance_batch(preset.batch_size)
    except ValueError as error:
        raise UsageError(f"--batch-size {preset.batch_size}: {error}") from None


def main(farewell: Farewell | None = None) -> None:
    options = parse_options(sys.argv[1:])
    if options.deterministic:
        use_deterministic_kernels()
    place = start()
    trainer = Trainer(options, resolve_preset(options, place), place, load_corpus())
    if farewell is not None:
        farewell.arm(trainer.leave)
    trainer.run(options.json)


if __name__ == "__main__":
    farewell = Farewell()
    run(lambda: main(farewell), farewell)
