"""A virtual GPU: any training script runs on a CUDA device that is not there, and its memory is known by line."""
