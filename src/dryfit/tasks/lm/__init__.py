"""The task ``causal-lm``: prompts, batches, adapters, generated answers."""
