"""Finetune a model of transformers. The program of docs/tutorials/finetune_transformers.md.

    torchrun --nproc-per-node 2 examples/tutorials/finetune_transformers.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from dtensor_gtp import gtp_shard

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (2,), mesh_dim_names=("gtp",))
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**sizes, intermediate_size=80, pad_token_id=0)
torch.manual_seed(0)  # all ranks begin with the same weights
model = AutoModelForCausalLM.from_config(config)  # for you: from_pretrained("meta-llama/Llama-3.1-8B")
model.gradient_checkpointing_enable({"use_reentrant": False})
gtp_shard(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

torch.manual_seed(dist.get_rank())  # each rank has its own text
tokens = torch.randint(1, 64, (4, 16)).to(device)
losses = []
for step in range(10):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0]

text = model.generate(tokens[:1, :4], do_sample=False, min_new_tokens=8, max_new_tokens=8)

from dtensor_gtp import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

model_state, optimizer_state = get_state_dict(model, optimizer)
checkpoint.save({"model": model_state, "optimizer": optimizer_state}, "checkpoint")

from dtensor_gtp.pretrained import save_pretrained

save_pretrained(model, "model")  # on all ranks
if dist.get_rank() == 0:
    model.config.save_pretrained("model")

if dist.get_rank() == 0:
    published = AutoModelForCausalLM.from_pretrained("model")
    prompt, length = tokens[:1, :4], {"min_new_tokens": 8, "max_new_tokens": 8}
    same = published.to(device).generate(prompt, do_sample=False, **length)
    assert torch.equal(same, text)
