"""Trains a causal language model by ``transformers.Trainer`` with ``gtp_shard`` on source code, on GPUs or on CPU.

torchrun --nproc-per-node 2 examples/train_transformers.py  # [--model NAME --lora --bf16 --resume ...]
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, TrainingArguments

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard
from dtensor_gtp.integrations.transformers import GTPTrainer
from text_data import load_corpus

SEQ_LEN, BATCH_SIZE = 96, 16


def main() -> None:
    parser = ArgumentParser(description="Train a causal language model by transformers.Trainer with gtp_shard.")
    parser.add_argument("--model", help="for from_pretrained; without it a small Llama over bytes, from its config")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT alone, and save them alone")
    parser.add_argument("--bf16", action="store_true", help="gather and compute in bf16, reduce in fp32")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, those before a resume included")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/train_transformers"), help="for the results")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, on any number of processes"
    )
    options, on_cpu = parser.parse_args(), not torch.cuda.is_available()
    args = TrainingArguments(output_dir=str(options.folder), use_cpu=on_cpu, report_to=[], disable_tqdm=True)
    args.set_dataloader(train_batch_size=BATCH_SIZE // args.world_size, eval_batch_size=BATCH_SIZE // args.world_size)
    args.set_training(
        learning_rate=options.lr,
        batch_size=BATCH_SIZE // args.world_size,
        max_steps=options.steps,
        gradient_accumulation_steps=2,
    )
    args.set_save(strategy="steps", steps=max(options.steps // 2, 1))

    torch.manual_seed(0)  # all ranks build the same model, of which each will keep its part
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **sizes)
    auto = AutoModelForCausalLM
    model = auto.from_pretrained(options.model) if options.model else auto.from_config(config)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bf16 else MixedPrecisionPolicy()
    gtp_shard(model, init_device_mesh(args.device.type, (args.world_size,)), mp_policy=policy)

    texts = [tokenizer.encode(bytes(part[: 2**19].tolist()).decode(errors="replace")) for part in load_corpus()[:2]]
    rows = [torch.tensor(text[: len(text) // SEQ_LEN * SEQ_LEN]).view(-1, SEQ_LEN) for text in texts]
    train, held_out = ([{"input_ids": row, "labels": row} for row in part] for part in rows)
    trainer = GTPTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=held_out[:128], processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]
    trainer.accelerator.print(f"validation loss {loss:.4f} after {options.steps} steps")
    trainer.save_model(str(options.folder / "model"))  # loads by from_pretrained; adapters by PeftModel.from_pretrained
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
