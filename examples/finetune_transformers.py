"""Finetunes a causal language model of ``transformers`` with ``gtp_shard`` on source code, on GPUs or on CPU.

torchrun --nproc-per-node 2 examples/finetune_transformers.py  # [--model NAME_OR_PATH --lr 2e-5]
"""

from argparse import ArgumentParser

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig

from dtensor_gtp import checkpoint, gtp_shard
from launch import run, start
from text_data import TextBatches, load_corpus


def main() -> None:
    parser = ArgumentParser(description="Finetune a causal language model of transformers with gtp_shard.")
    parser.add_argument("--model", help="for from_pretrained; without it a small Llama over bytes, from its config")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--folder", default="checkpoints/finetune_transformers", help="for the results")
    options, place, auto = parser.parse_args(), start(), AutoModelForCausalLM
    torch.manual_seed(0)  # all ranks build the same model, of which each will keep its part
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **sizes)
    model = auto.from_pretrained(options.model) if options.model else auto.from_config(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    gtp_shard(model, init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("gtp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    texts = [tokenizer.encode(bytes(part[: 2**20].tolist()).decode(errors="replace")) for part in load_corpus()[:2]]
    shape = {"seq_len": 96, "batch_size": 16, "seed": 0, "rank": place.rank, "world_size": place.world_size}
    train, held_out = (TextBatches(torch.tensor(text, device=place.device), **shape) for text in texts)
    for num_steps in (0, options.steps):
        for step in range(num_steps):
            tokens = train(step).inputs
            model.train()(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            batches = [held_out(index).inputs for index in range(4)]
            loss = torch.stack([model.eval()(input_ids=tokens, labels=tokens).loss for tokens in batches]).mean()
        place.print_once(f"validation loss {place.mean_over_ranks(loss):.4f} after {num_steps} steps")
    prompt = held_out(0).inputs[:1, :48]  # each rank its own, but equally many new tokens: each of them is collective
    written = model.generate(prompt, do_sample=False, min_new_tokens=48, max_new_tokens=48)[0]
    place.print_once(tokenizer.decode(written))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(states, f"{options.folder}/checkpoint")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if place.rank == 0:
        model.save_pretrained(f"{options.folder}/model", state_dict=whole)
        tokenizer.save_pretrained(f"{options.folder}/model")


if __name__ == "__main__":
    run(main)
