"""How all this gets into ``nn.Module``: what is sharded, bindings, frames, fused forwards."""
