"""The only modules that touch private names of torch, transformers and accelerate.

One module for each thing that dryfit does with a library; the library's name comes first. Each has ``NAMES`` with the
reason for every name and the condition for its removal, the names under public ones of ours, and a
:class:`~dryfit.core.private_names.PrivateNames` with the self-test that a feature asks for where it begins. Nothing of
another library is imported here that its users would not import anyway.
"""
