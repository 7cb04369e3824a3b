"""weftmoe: colocated GRPO training of MoE models on DAPO-Math, in three variants that one script compares.

`run.sh` checks the machine and calls `weftmoe.launch`, which resolves the settings (`weftmoe.settings`), gives each
role its environment (`weftmoe.env`) and starts the trainer's ranks.
"""
