"""Trackers that follow the ledger: TensorBoard, MLflow, Weights & Biases, Trackio; each written by its own process."""
