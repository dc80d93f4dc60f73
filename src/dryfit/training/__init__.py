"""Training: one trial from its request to its result, and every job of a child process."""

from dryfit.gpu.offline_import import keep_offline

keep_offline()  # before a job imports transformers, which imports bitsandbytes where it is installed
