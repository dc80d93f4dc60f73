"""Tasks: how rows become tokens, a model, a loss, metrics and predictions; and what scored rows tell."""
