"""The training loop: a real Megatron trainer, a rollout engine, and the colocated step that joins them."""
