"""The main job, end to end: train a small MoE, publish every step, check every byte."""
