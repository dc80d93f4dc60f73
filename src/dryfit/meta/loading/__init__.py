"""Pretrained models: configs, keys, and every tensor given its weights or an error before anything changes."""
