"""The work of child processes, one module a job: each takes a request and returns a result."""

from dryfit.meta.offline_import import keep_offline

keep_offline()  # before a job imports transformers, which imports bitsandbytes where it is installed
