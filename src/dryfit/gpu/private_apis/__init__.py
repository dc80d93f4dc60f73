"""Private names of torch and transformers that the virtual GPU touches, and what is built on it.

As in ``dryfit.meta.private_apis``, one module for each thing that dryfit does with a library. Nothing but torch is
imported here: modules of transformers are given by whoever has met them.
"""
